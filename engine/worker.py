"""The process that computes what another process schedules: steps of prompts, or one rank's share of each step."""

import sys
from pathlib import Path

from engine.config import EngineConfig
from engine.device.placement import resolve_device, use_device
from engine.disaggregation.prefill_client import written_blocks
from engine.disaggregation.worker_line import WorkerLine, serve_parent
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kv.kv_cache import KVShape
from engine.model.compiling import compile_layers
from engine.model.shard import Shard


class WorkerEngine(Engine):
    """The engine of a process that another process sends token batches to, one after the other."""

    def serve_prompts(self, line: WorkerLine, kv_shape: KVShape) -> None:
        """Computes steps of prompts, whose block ids are valid in both processes, with compiled layers where the other
        process has compiled its own. Answers each with ``[R, hidden]`` of its output rows, and with the KV of the
        blocks that it writes. Raises `ConfigError` where the other process has KV of another shape."""
        if kv_shape != self._model.kv_shape:
            raise ConfigError(f"the process that decodes has {kv_shape}, the one for prompts {self._model.kv_shape}")
        for batch, is_compiled in line.messages():
            if is_compiled:
                compile_layers(self._model)
            hidden = self._runner.forward(batch).clone()  # a view would be sent with all rows of the step
            line.send(hidden.cpu(), self._cache.read_blocks(written_blocks(batch)))

    def serve_steps(self, line: WorkerLine) -> None:
        """Computes this rank's share of each step."""
        for batch in line.messages():
            self._runner.forward(batch)


def load_rank(line: WorkerLine, model: str, config: EngineConfig, rank: int, meeting_file: Path) -> WorkerEngine:
    """The engine of a `rank` of `model` other than the first, which is told before the two meet. See `Shard.join`."""
    shard = Shard(rank, config.tensor_parallel_size, resolve_device(config.device))
    use_device(shard.device)
    line.send(None)
    shard.join(meeting_file)
    return WorkerEngine.load(model, config, shard=shard)


def main() -> None:
    """Serves the parent process. Arguments: file descriptors of socket and shared memory, the memory's bytes. The first
    message has the model, the config, and the arguments of `serve_prompts` or `load_rank`."""
    with serve_parent(*map(int, sys.argv[1:])) as line:
        model, config, *rest = line.receive()[0]
        if config.tensor_parallel_size > 1:
            load_rank(line, model, config, *rest).serve_steps(line)
        else:
            WorkerEngine.load(model, config).serve_prompts(line, *rest)


if __name__ == "__main__":
    main()
