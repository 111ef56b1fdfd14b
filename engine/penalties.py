"""Penalties for tokens that a prompt or its answer has had already."""

from dataclasses import dataclass
from math import isfinite
from numbers import Real

from engine.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """What lowers the logits of tokens before a request's next token is chosen, greedily or drawn.

    Args:
        repetition: divides positive logits of tokens in the prompt or the answer so far, and multiplies negative ones;
            above 0, 1 changes nothing (Keskar et al. 2019, "CTRL", section 4.1; as in transformers).
        presence: subtracted from the logits of tokens in the answer so far.
        frequency: subtracted once for each time that a token is in the answer so far.
    Raises:
        RequestError: a value is not a finite number, or a repetition penalty is not above 0.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def __post_init__(self) -> None:
        for name in ("repetition", "presence", "frequency"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, Real) or not isfinite(given):
                raise RequestError(f"{name}_penalty must be a finite number, got {given!r}")
        if not self.repetition > 0:
            raise RequestError(f"repetition_penalty must be above 0, got {self.repetition}")
