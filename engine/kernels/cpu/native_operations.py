"""The C++ kernels for layers that are torch modules, and draws of tokens."""

import ctypes

import torch

from engine.kernels.cpu.attention_shape import AttentionShape
from engine.kernels.cpu.layer_structures import NativeWork, ScoringStructure
from engine.kernels.cpu.native_build import address
from engine.kernels.scoring import Scoring


class NativeOperations(AttentionShape):
    """Attention with its KV write, and draws of tokens."""

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, work: NativeWork, scoring: Scoring
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`; cpp/attention.h describes the layout of the caches. Query rows may be strided;
        where the heads of a row are not contiguous, the query is copied."""
        if query.stride()[1:] != (self.head_dim, 1):
            query = query.contiguous()
        out = self.new_rows(query.shape[0], self.num_q_heads * self.head_dim)
        sinks = None if scoring.sinks is None else scoring.sinks.float().contiguous()
        rule = ScoringStructure(scoring.scale, scoring.softcap, scoring.window, address(sinks))
        self.kernel("attend")(
            *(query.data_ptr(), query.stride(0), out.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()),
            *map(ctypes.byref, (self.structure, rule, work)),
        )
        return out.view(-1, self.num_q_heads, self.head_dim)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, work: NativeWork
    ) -> None:
        """See `AttentionBackend.write_kv`."""
        qkv = torch.cat([key.new_zeros(len(key), self.num_q_heads, self.head_dim), key, value], dim=1).flatten(1)
        cos = torch.ones(len(key), self.head_dim, dtype=torch.float32)
        sin = torch.zeros_like(cos)
        self.kernel("rotate_and_store")(
            *(*map(address, (qkv, cos, sin, None, None)), 0.0, k_cache.data_ptr(), v_cache.data_ptr()),
            *map(ctypes.byref, (self.structure, work)),
        )

    def draw_tokens(self, logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend.draw_tokens`; sorts only likely tokens."""
        logits, settings = logits.contiguous(), settings.contiguous()
        out = torch.empty(len(logits), dtype=torch.int64)
        self.library.draw_tokens(logits.data_ptr(), settings.data_ptr(), out.data_ptr(), *logits.shape)
        return out
