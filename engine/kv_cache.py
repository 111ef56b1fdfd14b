"""The paged KV memory of one model on one device, and how much of it a budget buys."""

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.errors import CapacityError


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What a model keeps per token: layers, KV heads, head dim, dtype."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Keys and values, one pair of tensors a layer: ``[num_blocks, block_size, num_kv_heads, head_dim]``."""

    __slots__ = ("block_size", "keys", "num_blocks", "values")

    def __init__(self, shape: KVShape, *, block_size: int, budget_bytes: int, device: torch.device) -> None:
        """Allocates as many blocks as the budget holds.

        Raises:
            CapacityError: the budget does not hold a single block.
        """
        self.block_size = block_size
        self.num_blocks = budget_bytes // (block_size * shape.bytes_per_token)
        if self.num_blocks < 1:
            raise CapacityError(
                f"a KV budget of {budget_bytes} bytes holds no block of {block_size} x {shape.bytes_per_token} bytes"
            )
        layout = (self.num_blocks, block_size, shape.num_kv_heads, shape.head_dim)
        # zeros: a block that was never written may be read under a mask, and 0 * NaN is NaN.
        # On the CPU the pages are mapped when first touched, so an ample budget costs nothing until used.
        self.keys = [torch.zeros(layout, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]
        self.values = [torch.zeros(layout, dtype=shape.dtype, device=device) for _ in range(shape.num_layers)]


def free_memory_bytes(device: torch.device) -> int:
    """Memory that is free for KV now: the GPU's, or the host's within its cgroup limit."""
    if device.type != "cpu":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo_available_bytes()
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))


def _meminfo_available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * 1024**3  # no Linux: a cautious guess that a budget in bytes overrides
