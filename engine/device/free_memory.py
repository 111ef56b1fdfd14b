"""Free memory of a device or of the host."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MOST_CPU_KV_BYTES = 4 * 1024**3
"""Most KV memory that "auto" takes on a CPU, whose memory is shared with other programs."""

_CGROUP = Path("/sys/fs/cgroup")


def free_memory_bytes(device: "torch.device") -> int:
    """Free memory of the GPU, or of the host within the limit of its cgroup (version 2)."""
    if device.type != "cpu":
        import torch

        reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # freed, kept by torch
        return int(torch.cuda.mem_get_info(device)[0]) + reusable
    return free_host_bytes()


def free_host_bytes() -> int:
    """As `free_memory_bytes`, of the host."""
    free = _meminfo_available_bytes()
    try:
        limit, used = (_CGROUP / "memory.max").read_text().strip(), int((_CGROUP / "memory.current").read_text())
        counts = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        used -= int(counts["inactive_file"])  # cached files, which the system drops first: as Kubernetes counts
    except (OSError, ValueError, KeyError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))


def _meminfo_available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * 1024**3  # not Linux: a cautious guess; a budget in bytes does not use it
