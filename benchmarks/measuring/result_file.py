"""A benchmark's result as a file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_result(file: Path, result: Mapping[str, Any]) -> None:
    """Writes JSON, into a folder that is made where it is missing; a file of before stays whole until this one is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(file.name + ".tmp")
    unfinished.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(unfinished, file)
