"""Plain paged attention, the first baseline: the fused launch with nothing shared.

Every sequence reads its prefix's KV again, through its own tiles. The tiles, their shapes, the splits of long ranges
and the merge are the fused kernel's, so that the two differ by sharing alone. What the fused launch falls back to for a
group that is not worth sharing is exactly this.
"""

from typing import ClassVar

from engine.kernels.triton.cost_model import SharePolicy
from engine.kernels.triton.fused import FusedAttention


class PagedAttention(FusedAttention):
    """One launch a layer; no prefix is shared in the kernel."""

    name: ClassVar[str] = "paged"
    _policy: ClassVar[SharePolicy] = "never"
