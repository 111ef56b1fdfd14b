"""The peak memory of this process."""

from pathlib import Path


def peak_resident_gb() -> float:
    """Peak resident memory in GB; unlike ru_maxrss it does not include the parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise OSError("/proc/self/status has no VmHWM line: peak memory can be measured on Linux only")
