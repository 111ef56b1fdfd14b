"""The engine of a worker process: it computes token batches that another process has scheduled."""

import torch

from engine.device.placement import use_device
from engine.disaggregation.prefill_client import written_blocks
from engine.engine import Engine
from engine.errors import ConfigError
from engine.kv.block_copies import BlockCopies
from engine.kv.kv_cache import KVShape
from engine.model.compiling import compile_layers
from engine.scheduling.token_batch import TokenBatch


class WorkerEngine(Engine):
    """Computes prompts for a process that decodes, or the share of one rank of a sharded model."""

    def compute_prompts(self, batch: TokenBatch, *, is_compiled: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes a step of prompts, whose block ids are valid in both processes. Returns, in host memory,
        ``[R, hidden]`` of the output rows, and the KV of the blocks that the step writes. `is_compiled` compiles the
        layers, as the decoding process has done."""
        use_device(self._model.device)
        if is_compiled:
            compile_layers(self._model)
        hidden = self._runner.forward(batch)
        return hidden.cpu(), BlockCopies(self._cache).read_blocks(written_blocks(batch))

    def compute_share(self, batch: TokenBatch) -> None:
        """Computes this rank's share of a step."""
        use_device(self._model.device)
        self._runner.forward(batch)

    def check_kv_shape(self, shape: KVShape) -> None:
        """Raises `ConfigError` where KV of this shape cannot be exchanged with this engine."""
        if shape != self._model.kv_shape:
            raise ConfigError(f"the process that decodes has {shape}, the one for prompts {self._model.kv_shape}")
