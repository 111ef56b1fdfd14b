"""What every layer's attention needs of one step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.attention_backend import AttentionBackend
from engine.kv.kv_cache import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """One step's arguments of every layer's attention; passed through the model's forward as a keyword. `works` has
    what `prepare` returned for each block table; `output_rows`, int64 ``[R]``, are the rows whose last hidden states
    are needed, None for all."""

    backend: AttentionBackend
    cache: KVCache
    works: Sequence[Any]
    output_rows: torch.Tensor | None = None
