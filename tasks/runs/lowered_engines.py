"""Notes in the run folder about engines that were loaded with less memory than was asked for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from tasks.storage.artifact import replace_file

NOTED = ("kv_memory_bytes", "memory_fraction", "max_num_batched_tokens")


def note_lowered(run_folder: str | Path, engine: EngineConfig) -> None:
    """Note the settings an engine was loaded with; engines with the same settings share a note."""
    value = {name: getattr(engine, name) for name in NOTED}
    path = Path(run_folder) / "engines" / f"{'-'.join(map(str, reversed(value.values())))}.json"
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with replace_file(path) as file:
            file.write(json.dumps(value).encode())


def list_lowered(run_folder: str | Path) -> list[dict[str, Any]]:
    """The noted settings, those with the most tokens in a step first."""
    notes = [json.loads(path.read_bytes()) for path in (Path(run_folder) / "engines").glob("*.json")]
    return sorted(notes, key=_num_batched_tokens, reverse=True)


def _num_batched_tokens(engine: Mapping[str, Any]) -> int:
    """Notes of earlier versions call the setting chunk_tokens."""
    return int(engine.get("max_num_batched_tokens") or engine.get("chunk_tokens") or 0)
