"""What an engine can answer at most, and why a request is beyond it."""

from dataclasses import dataclass

from engine.kernels import cdiv
from engine.request import Request
from engine.scheduling.sequence import most_extra_tokens


def most_tokens(request: Request) -> int:
    """Of a request's prompt with its answer, or with its longest label."""
    return len(request.token_ids) + most_extra_tokens(request) + 1


def most_blocks(request: Request, block_size: int) -> int:
    """KV blocks that a request needs alone.

    A prefix and the own part are rounded up to blocks apart: one block more than for the whole.
    """
    return cdiv(most_tokens(request), block_size) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """Limits on one request alone.

    Attributes:
        max_model_len: prompt plus answer, in tokens.
        block_size, num_kv_blocks: of the KV memory.
    """

    vocab_size: int
    max_model_len: int
    block_size: int
    num_kv_blocks: int

    def why_impossible(self, request: Request, *, can_decode: bool) -> str | None:
        """Why a request cannot be answered even alone; None where it can.

        Args:
            can_decode: whether there is a decoder for stop strings.
        """
        num_prompt_tokens = len(request.token_ids)
        largest = max(int(request.token_ids.max()), *(max(label) for label in request.labels), 0)
        if largest >= self.vocab_size:
            return f"token id {largest} is not below the vocabulary size {self.vocab_size}"
        if any(token < 0 for label in request.labels for token in label):
            return f"label token ids must not be negative, got {request.labels}"
        num_tokens = most_tokens(request)
        if num_tokens > self.max_model_len:
            return (
                f"the prompt has {num_prompt_tokens} tokens, with {num_tokens - num_prompt_tokens} for the answer "
                f"{num_tokens}, which exceeds the context of {self.max_model_len}"
            )
        num_blocks = most_blocks(request, self.block_size)
        if num_blocks > self.num_kv_blocks:
            return (
                f"{num_tokens} tokens need up to {num_blocks} KV blocks of {self.block_size} tokens, "
                f"the memory budget holds {self.num_kv_blocks}"
            )
        if request.stop and not can_decode:
            return "stop strings need the caller's decoder: pass decode="
        return None
