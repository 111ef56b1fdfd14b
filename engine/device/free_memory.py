"""The memory that a device, or the host, has left."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MOST_CPU_KV_BYTES = 4 * 1024**3
"""On a host, a KV budget of "auto" takes no more than this: other programs live there too."""


def free_memory_bytes(device: "torch.device") -> int:
    """Memory that is free for KV now: the GPU's, or the host's within its cgroup limit."""
    if device.type != "cpu":
        import torch

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
