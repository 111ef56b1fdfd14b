"""The engine of this process: loaded once and kept for later partitions and workloads; one at a time."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.device.placement import resolve_device
from engine.errors import CapacityError, ModelError
from engine.model.loading.checkpoint import checkpoint_digest
from tasks.partitions.out_of_memory import can_lower, describe_memory, free_memory, is_out_of_memory, lower
from tasks.prompts.text_codec import TextCodec
from tasks.runs.infer_job import InferJob

if TYPE_CHECKING:
    from engine.encoding.encoder_engine import EncoderEngine
    from engine.engine import Engine

LOGGER = logging.getLogger("batchloom")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A checkpoint in memory: the engine and the tokenizer."""

    engine: "Engine | EncoderEngine"
    codec: TextCodec


class EngineHost:
    """Holds at most one loaded model. A lock makes callers take turns: an engine serves one call at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._key: tuple[str, str, EngineConfig] | None = None
        self._model: LoadedModel | None = None
        self._num_halvings = 0
        self._has_loaded = False

    @contextmanager
    def use(self, job: InferJob) -> Iterator[LoadedModel]:
        """The job's model with its workload's adapter; another model is dropped before this one is loaded. Its engine
        has less memory than asked for if memory ran out, see `lower_memory`. Raises as `Engine.load`."""
        with self._lock:
            key = (job.checkpoint, job.model_digest, job.engine)
            if self._key != key:
                self._key, self._model, self._num_halvings = key, None, 0
            if self._model is not None and self._model.engine.adapter != job.first.workload.adapter:
                from tasks.partitions.adapter_exchange import exchange_adapter  # imported only when needed

                loaded, self._model = self._model, None
                if job.keeps_base and exchange_adapter(loaded.engine, job.first.workload.adapter):
                    self._model = loaded
                del loaded
            if self._model is not None and not self._model.engine.is_usable:
                self._model = None
            if self._model is None:
                if self._has_loaded:
                    free_memory()
                self._model, self._has_loaded = self._load(job), True
            yield self._model

    def lower_memory(self) -> bool:
        """Drop the model; its next use loads it with half the memory. False if it cannot do with less."""
        with self._lock:
            if self._key is None or not self._halve(self._key[2]):
                return False
            self._model = None
            return True

    def release(self) -> None:
        """Drop the model; the next `use` loads one with all the memory that its job asks for. A GPU's memory is free at
        once, for other processes; a CPU's, which takes a tenth of a second, before the next model is loaded."""
        with self._lock:
            key, self._key, self._model, self._num_halvings = self._key, None, None, 0
            if key is not None and resolve_device(key[2].device).type != "cpu":
                free_memory()

    def _load(self, job: InferJob) -> LoadedModel:
        codec = TextCodec.load(Path(job.checkpoint))
        while True:
            given = lower(job.engine, self._num_halvings) if self._num_halvings else job.engine
            engine = _load_engine(job, given)
            if engine is not None:
                if checkpoint_digest(Path(job.checkpoint)) != job.model_digest:
                    raise ModelError(f"model {job.checkpoint!r} here differs from the one where the run began")
                return LoadedModel(engine=engine, codec=codec)
            free_memory()
            if not self._halve(job.engine):
                raise CapacityError(f"no memory for the KV of {job.checkpoint}, not even with {describe_memory(given)}")

    def _halve(self, config: EngineConfig) -> bool:
        if not can_lower(config, self._num_halvings):
            return False
        self._num_halvings += 1
        LOGGER.warning("out of memory: going on with %s", describe_memory(lower(config, self._num_halvings)))
        return True


PROCESS_HOST = EngineHost()
"""The host of this process: its model is loaded when the second partition starts."""


def _load_engine(job: InferJob, config: EngineConfig) -> "Engine | EncoderEngine | None":
    """The engine, or None if memory ran out. Raises as `Engine.load`."""
    from engine.engine import Engine  # seconds to import; a night without new rows needs no engine

    checkpoint, adapter = job.checkpoint, job.first.workload.adapter
    try:
        if job.first.workload.kind.is_pooled:
            from engine.encoding.encoder_engine import EncoderEngine
            from engine.encoding.families import is_encoder

            if is_encoder(Path(checkpoint)):
                return EncoderEngine.load(checkpoint, config, adapter=adapter)
        if config.keep_prefixes_bytes:
            from engine.keeping.keeping_engine import KeepingEngine as Engine
        return Engine.load(checkpoint, config, adapter=adapter, keeps_base=job.keeps_base)
    except Exception as error:
        if is_out_of_memory(error):
            return None
        raise
