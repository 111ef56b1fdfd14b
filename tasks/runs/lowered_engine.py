"""Engines that had to be loaded with less memory than was asked for, noted in the run folder for the run's record."""

import json
from pathlib import Path
from typing import Any

from engine.config import EngineConfig
from tasks.storage.artifact import replace_file


def note_engine(folder: str | Path, engine: EngineConfig) -> None:
    """Keep the settings of an engine that had to be loaded with less memory than was asked for."""
    value = {name: getattr(engine, name) for name in ("kv_memory_bytes", "memory_fraction", "max_num_batched_tokens")}
    path = (
        Path(folder)
        / "engines"
        / f"{engine.max_num_batched_tokens}-{engine.kv_memory_bytes}-{engine.memory_fraction}.json"
    )
    if not path.exists():
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with replace_file(path) as file:
            file.write(json.dumps(value).encode())


def list_engines(folder: str | Path) -> list[dict[str, Any]]:
    """What `note_engine` has kept, the largest first."""
    engines = [json.loads(path.read_bytes()) for path in (Path(folder) / "engines").glob("*.json")]
    return sorted(engines, key=lambda engine: -engine["max_num_batched_tokens"])
