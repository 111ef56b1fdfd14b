"""How attention turns scores into weights."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scoring:
    """The rule of one layer.

    Attributes:
        scale: multiplied with the scores.
        softcap: c: scores become c * tanh(score / c); 0: no cap.
        window: how many positions a row sees, its own included; 0: all.
        sinks: ``[num_q_heads]``, one more score per head in the softmax, which has no value.
    """

    scale: float
    softcap: float = 0.0
    window: int = 0
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether scores are only scaled, and every row sees all positions before it."""
        return not (self.softcap or self.window) and self.sinks is None
