"""Learns from earlier nights how long a model takes to load, and how real step times compare with simulated ones."""

import os
import time
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ModelError
from engine.model.loading.checkpoint import GGUF_TENSORS
from engine.model.loading.gguf import gguf_file
from tasks.database.connection import connect, execute
from tasks.database.schema import list_relations
from tasks.runs.source import Source

PROBED_BYTES = 16 << 20


def forecast_load(source: Source, engine: EngineConfig) -> float:
    """Seconds to load the source's model.

    The median of the times that the newest runs took beside their steps, of those that loaded the model: which took at
    least half the time to read its files. Without such a run it is the time to read the files, at the rate of the
    largest file's first bytes. See the statement for nights that were not begun.

    Args:
        source: its database has earlier runs.
        engine: names device and number format.
    Raises:
        DatabaseError: the database is locked.
        ModelError: the folder holds no weights.
    """
    reading = _time_reading(source.checkpoint)
    found = _read_earlier(source, "read/load_seconds", engine, least_seconds=reading / 2)
    return found[0] if found else reading


def find_speed_ratio(source: Source, engine: EngineConfig) -> float:
    """Real over simulated time of steps: the median of the newest runs that were predicted; 1 if there are none."""
    found = _read_earlier(source, "read/speed_ratio", engine)
    return found[0] if found else 1.0


def _read_earlier(source: Source, name: str, engine: EngineConfig, **more: float) -> list[float]:
    asked = {"model_digest": source.model_digest, "device": engine.device, "dtype": engine.dtype} | more
    with connect(source.database, read_only=True) as connection:
        if not {"runs", "steps"} <= list_relations(connection).keys():
            return []
        return [value for (value,) in execute(connection, name, asked).fetchall() if value is not None]


def _time_reading(checkpoint: Path) -> float:
    """Seconds to read a checkpoint's weights, measured on the disk if the system can drop its cache."""
    files = [gguf_file(checkpoint)] if (checkpoint / GGUF_TENSORS).is_file() else checkpoint.glob("*.safetensors")
    sizes = {path: path.stat().st_size for path in files}
    if not any(sizes.values()):
        raise ModelError(f"model {str(checkpoint)!r}: the folder holds no weights")
    largest = max(sizes, key=lambda path: sizes[path])
    num_bytes = min(PROBED_BYTES, sizes[largest])
    with open(largest, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, num_bytes, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        file.read(num_bytes)
        seconds = time.perf_counter() - started
    return seconds * sum(sizes.values()) / num_bytes
