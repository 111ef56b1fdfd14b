"""The result files of stages, and how stages end; imports nothing that takes seconds."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DONE, FAILED, UNFINISHED, LOST, TIMED_OUT, HUNG = 0, 1, 3, 4, 124, 125
"""Exit codes of a stage. An unfinished stage ran out of time; the same command continues it. A lost one has no device
any more: after some errors every call of CUDA fails until the process ends. The last two were killed: at the stage's
limit, and at that of a part."""


def now() -> str:
    """The time, UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def read_stage(folder: Path, name: str) -> dict[str, Any]:
    """A stage's file; empty if there is none."""
    file = folder / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def found_parts(document: Mapping[str, Any]) -> dict[str, Any]:
    """The results in a stage's file, by part."""
    return {part: value["found"] for part, value in document.get("parts", {}).items() if "found" in value}


def read_parts(folder: Path, name: str) -> dict[str, Any]:
    """A stage's results by part, of whatever device and commit."""
    return found_parts(read_stage(folder, name))
