"""Reads JSON files of checkpoints."""

import json
from pathlib import Path
from typing import Any

from engine.errors import ModelError


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `ModelError` if there is none."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold an object, got {type(values).__name__}")
    return values
