"""The engine's answer to a request, in token ids."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

FinishReason = Literal["eos", "stop", "length", "scored", "embedded", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer to one request.

    Attributes:
        finish_reason: "stop" also where a grammar's answer is complete and no token is left for the end of sequence.
        token_ids: generated tokens, the end-of-sequence token included; empty in other modes than "generate".
        thinking_token_ids: the thoughts before the answer, without the token that ends them.
        label_logprobs: score and classify; one natural-log probability per label or class, normalised over them, unless
            a head has one class or classes that do not exclude each other.
        embedding: embed only; float32 ``[n]``. Not compared.
        num_cached_tokens: prompt tokens that were not computed for this request (shared prefix or identical prompt).
        compute_ms: its share of the steps' time, by the tokens computed for it; 0 where another request with the same
            prompt has it. The shares of all completions add up to the time of all steps. Not compared.
        error: why there is no answer; then finish_reason is "error" and the answer fields are empty.
    """

    request_id: str
    finish_reason: FinishReason
    token_ids: Sequence[int] = ()
    thinking_token_ids: Sequence[int] = ()
    label_logprobs: Sequence[float] = ()
    embedding: npt.NDArray[np.float32] | None = field(default=None, compare=False)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    compute_ms: float = field(default=0.0, compare=False)
    error: str | None = None

    @classmethod
    def refuse(cls, request_id: str, num_prompt_tokens: int, why: str) -> "Completion":
        """The completion of a request that cannot be answered, for the reason `why`. See `Completion`."""
        return cls(request_id=request_id, finish_reason="error", num_prompt_tokens=num_prompt_tokens, error=why)
