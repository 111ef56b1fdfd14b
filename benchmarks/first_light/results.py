"""Reads the result files of stages; imports nothing that takes seconds."""

import json
from pathlib import Path
from typing import Any


def read_stage(folder: Path, name: str) -> dict[str, Any]:
    """A stage's file; empty if there is none."""
    file = folder / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def read_parts(folder: Path, name: str) -> dict[str, Any]:
    """A stage's results, by part."""
    return {
        part: value["found"] for part, value in read_stage(folder, name).get("parts", {}).items() if "found" in value
    }
