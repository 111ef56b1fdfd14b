"""The thoughts of a model before its answer: the token that ends them, and the tokens forced at their budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index

from engine.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """The limits of an answer's thoughts. The prompt ends with the token that opens them.

    An end-of-sequence token is never allowed within thoughts.

    Args:
        end_token_id: the end token of the thoughts.
        closing: tokens that are forced when the budget is used up; one of them is the end token. Those after it follow
            every end token: the chat template has them between thoughts and answer.
        max_tokens: the budget, `closing` included.
    Raises:
        RequestError: a value is not a whole number; `closing` does not hold the end token once, or is not shorter than
            the budget.
    """

    end_token_id: int
    closing: tuple[int, ...]
    max_tokens: int

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "closing", tuple(map(index, self.closing)))
            object.__setattr__(self, "end_token_id", index(self.end_token_id))
            object.__setattr__(self, "max_tokens", index(self.max_tokens))
        except TypeError as error:
            raise RequestError(f"token ids and max_tokens of thoughts must be whole numbers: {error}") from error
        if self.closing.count(self.end_token_id) != 1:
            raise RequestError(f"what closes thoughts must hold token {self.end_token_id} once, got {self.closing}")
        if self.max_tokens <= len(self.closing):
            raise RequestError(
                f"thoughts of at most {self.max_tokens} tokens are too short: closing them takes {len(self.closing)}"
            )

    @cached_property
    def seam(self) -> tuple[int, ...]:
        """The tokens between the end token and the answer."""
        return self.closing[self.closing.index(self.end_token_id) + 1 :]

    def follow(self, token_id: int, num_tokens: int) -> tuple[int, ...] | None:
        """The tokens that are forced after `token_id`, the num_tokens-th; None where the thoughts go on."""
        if token_id == self.end_token_id:
            return self.seam
        return self.closing if num_tokens == self.max_tokens - len(self.closing) else None

    def split(self, token_ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The thoughts, without their end token, and the answer, of all tokens that were generated for a request."""
        end = token_ids.index(self.end_token_id)
        return tuple(token_ids[:end]), tuple(token_ids[end + 1 + len(self.seam) :])
