"""The engine of this process: loaded once, kept between partitions and workloads, one at a time."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from tasks.text_codec import TextCodec

if TYPE_CHECKING:
    from engine.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A checkpoint in memory: the engine and the tokenizer."""

    engine: "Engine"
    codec: TextCodec


class EngineHost:
    """Holds at most one loaded model. Its lock makes users take turns, since an engine serves one call at a time."""

    __slots__ = ("_key", "_lock", "_model")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: tuple[str, str, EngineConfig] | None = None
        self._model: LoadedModel | None = None

    @contextmanager
    def use(self, checkpoint: str, model_digest: str, config: EngineConfig) -> Iterator[LoadedModel]:
        """The model of a checkpoint folder, for the length of the block. Another one is dropped before it is loaded.

        Raises:
            ModelError, CapacityError: as `Engine.load`.
        """
        # OpenMP reads it when torch is imported. Threads that spin for milliseconds while they wait for each other slow
        # a run down several times where cores are shared with other programs; tens of microseconds keep the gain.
        os.environ.setdefault("GOMP_SPINCOUNT", "30000")
        from engine.engine import Engine  # seconds to import, and a night with nothing new needs none

        with self._lock:
            key = (checkpoint, model_digest, config)
            if self._key != key or self._model is None:
                self._key = self._model = None
                codec = TextCodec.load(Path(checkpoint))
                self._model = LoadedModel(engine=Engine.load(checkpoint, config), codec=codec)
                self._key = key
            yield self._model

    def release(self) -> None:
        """Give the memory back; the next `use` loads again."""
        with self._lock:
            self._key = self._model = None


PROCESS_HOST = EngineHost()
"""Of this worker process: what makes the second partition start at once."""
