"""A benchmark's result as a file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_result(file: Path, result: Mapping[str, Any]) -> None:
    """Writes JSON, into a folder that is made where it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n")
