"""An engine that reads the KV of prefixes that earlier runs have computed, and keeps the KV of its own prefixes."""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine.code_versions import code_versions
from engine.completion import Completion
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import ConfigError
from engine.execution.step_record import StepRecord
from engine.keeping.kept_run import KeptNode, KeptRun
from engine.keeping.prefix_keeper import PrefixKeeper
from engine.keeping.prefix_store import PrefixStore
from engine.model.loading.checkpoint import checkpoint_digest
from engine.model.model import Model
from engine.planning.group import PrefixGroup
from engine.request import Request

LOGGER = logging.getLogger("batchloom.engine")


class KeepingEngine(Engine):
    """As `Engine`, with ``keep_prefixes_bytes`` of KV in the folder ``prefix_folder`` of its configuration. If the
    folder cannot be used, all prefixes are computed, with a warning in the log. No folder raises `ConfigError`."""

    def __init__(self, model: Model, config: EngineConfig | None = None, checkpoint: Path | None = None) -> None:
        super().__init__(model, config, checkpoint)
        config = self.config
        self._keeper: PrefixKeeper | None = None
        if checkpoint is None:
            LOGGER.warning("no prefixes are kept: a loaded model has no digest")
            return
        if not config.prefix_folder:
            raise ConfigError("keep_prefixes_bytes needs a prefix_folder")
        self._digest = checkpoint_digest(checkpoint)
        try:
            store = PrefixStore(Path(config.prefix_folder), config.keep_prefixes_bytes)
            self._keeper = PrefixKeeper(store, self._cache)
        except OSError as error:
            LOGGER.warning("no prefixes are kept: %s: %s", config.prefix_folder, error)

    def run_plan(
        self,
        requests: Sequence[Request],
        groups: Sequence[PrefixGroup],
        *,
        on_step: Callable[[StepRecord], None] | None = None,
        **how: Any,
    ) -> Iterator[Completion]:
        """See `Engine.run_plan`. At its end prefixes are on disk; a run that ends early drops unwritten ones."""
        if self._keeper is None or not (on_step is None or callable(on_step)):  # the latter is refused
            yield from super().run_plan(requests, groups, on_step=on_step, **how)
            return
        adapter = "" if self.adapter is None else self.adapter.digest
        # The backend's layers may order the dimensions of key heads in another way than torch modules.
        layers = self._runner.attention.name + ("" if self._model.has_replaced_layers else " modules")
        code = " ".join(code_versions("kernels", "model").values())
        run = KeptRun(self._keeper, f"{self._digest} {adapter} {self.config.dtype} {layers} {code}")
        try:
            how |= {"on_step": run.watch(on_step), "make_node": partial(KeptNode, run)}
            yield from super().run_plan(requests, run.extend(groups), **how)
            run.finish_writes()
        finally:
            run.end()
