"""How much memory this process has had at most."""

from pathlib import Path


def peak_resident_gb() -> float:
    """Of this process image; unlike ru_maxrss it does not carry over what the parent had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e9
    raise OSError("/proc/self/status has no VmHWM line: peak memory can be measured on Linux only")
