"""What a model thinks before its answer: where it ends, and what is forced where it takes too long."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.errors import RequestError


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """The thoughts of an answer. The prompt ends with the mark that opens them.

    Whatever the model says, no end-of-sequence token ends its thoughts.

    Args:
        end_token_id: the mark that ends them.
        closing: tokens that are forced where the budget is spent; one of them is the mark. Those behind it follow the
            mark always: what the chat template writes between thoughts and answer.
        max_tokens: the budget, in which `closing` counts.

    Raises:
        RequestError: `closing` does not hold the mark once, or is not within the budget.
    """

    end_token_id: int
    closing: tuple[int, ...]
    max_tokens: int

    def __post_init__(self) -> None:
        if self.closing.count(self.end_token_id) != 1:
            raise RequestError(f"what closes thoughts must hold token {self.end_token_id} once, got {self.closing}")
        if self.max_tokens <= len(self.closing):
            raise RequestError(
                f"thoughts of at most {self.max_tokens} tokens are too short: closing them takes {len(self.closing)}"
            )

    @cached_property
    def seam(self) -> tuple[int, ...]:
        """The tokens between the mark and the answer."""
        return self.closing[self.closing.index(self.end_token_id) + 1 :]

    def follow(self, token_id: int, num_tokens: int) -> tuple[int, ...] | None:
        """What is forced behind a token, up to where the answer begins; None where the thoughts go on.

        Args:
            token_id: the model's last.
            num_tokens: of the thoughts so far, with this one.
        """
        if token_id == self.end_token_id:
            return self.seam
        return self.closing if num_tokens == self.max_tokens - len(self.closing) else None

    def split(self, token_ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The thoughts, without their mark, and the answer.

        Args:
            token_ids: what a request was answered with.
        """
        end = token_ids.index(self.end_token_id)
        return tuple(token_ids[:end]), tuple(token_ids[end + 1 + len(self.seam) :])
