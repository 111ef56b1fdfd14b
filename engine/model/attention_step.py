"""What every layer's attention needs of one step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.scoring import Scoring
from engine.kv.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """One step's arguments of every layer's attention, a keyword of the model's forward. `works` has what `prepare`
    returned for each block table; the last hidden states of `output_rows`, int64 ``[R]``, are needed; None: all."""

    backend: AttentionBackend
    cache: KVCache
    works: Sequence[Any]
    output_rows: torch.Tensor | None = None

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """Writes the step's keys and values of a layer, then attends. See `AttentionBackend.attend`."""
        k_cache, v_cache = self.cache.keys[layer], self.cache.values[layer]
        work = self.works[self.cache.layout.tables[layer]]
        self.backend.write_kv(key, value, k_cache, v_cache, work)
        return self.backend.attend(query, k_cache, v_cache, work, scoring)
