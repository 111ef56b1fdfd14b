"""What stages have left in their folder; imports nothing that takes seconds."""

import json
from pathlib import Path
from typing import Any


def read_stage(folder: Path, name: str) -> dict[str, Any]:
    """A stage's file; empty where there is none."""
    file = folder / f"{name}.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found


def read_parts(folder: Path, name: str) -> dict[str, Any]:
    """What a stage has found, by part."""
    return {
        part: value["found"] for part, value in read_stage(folder, name).get("parts", {}).items() if "found" in value
    }
