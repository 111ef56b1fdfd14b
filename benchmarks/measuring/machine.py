"""Describes the machine and the command of a measurement; recorded with every result."""

import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "transformers", "duckdb", "prefect", "numpy")


def describe_machine() -> dict[str, Any]:
    """Processor, cores, memory, load of others, versions of Python and packages, and the repository's commit."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": cpu[0] if cpu else platform.processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_average_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {found.name: found.version for found in distributions() if found.name in PACKAGES},
        "commit": commit(),
    }


def describe_command(module: str, command_line: Sequence[str]) -> str:
    """The command that repeats the measurement; absolute paths are cut to their last part."""
    names = [Path(argument).name if argument.startswith("/") else argument for argument in command_line]
    return shlex.join(["python", "-m", module, *names])


def commit() -> str:
    """The repository's commit, with "+" if the working tree differs from it; "unknown" without git or repository."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12"],
            cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"
