"""The C++ kernels called one operation at a time, for layers that are not computed in one call."""

import ctypes

import torch

from engine.kernels.cpu.attention_shape import AttentionShape
from engine.kernels.cpu.layer_structures import NativeWork, ScoringStructure
from engine.kernels.cpu.native_build import address
from engine.kernels.scoring import Scoring


class NativeOperations(AttentionShape):
    """The operations of a decoder layer, and draws of tokens."""

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
        self.rotate_and_write_kv(qkv, cos, sin, k_cache, v_cache, work)

    def rotate_and_write_kv(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        work: NativeWork,
        *,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        epsilon: float = 0.0,
    ) -> None:
        """Norms query and key heads if norms are given, rotates them, all in place, and writes the step's KV.

        Args:
            qkv: ``[T, (num_q_heads + 2 * num_kv_heads) * head_dim]``, contiguous.
            cos, sin: float32 ``[T, head_dim]``, contiguous.
            q_norm, k_norm: ``[head_dim]``.
        """
        self.kernel("rotate_and_store")(
            *(*map(address, (qkv, cos, sin, q_norm, k_norm)), epsilon, k_cache.data_ptr(), v_cache.data_ptr()),
            *map(ctypes.byref, (self.structure, work)),
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        """Divides each row by its root mean square and multiplies it by the weight: ``[T, n]``.

        Args:
            x, weight: ``[T, n]`` and ``[n]``.
            epsilon: added to the mean square.
        """
        out = self.new_rows(*x.shape)
        self.kernel("rms_norm")(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, epsilon)
        return out

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``[T, 2 n]``, gate beside up -> ``[T, n]``: silu(gate) * up."""
        out = self.new_rows(gate_up.shape[0], gate_up.shape[1] // 2)
        self.kernel("swiglu")(gate_up.data_ptr(), out.data_ptr(), *out.shape)
        return out

    def draw_tokens(self, logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """See `AttentionBackend.draw_tokens`; sorts only likely tokens."""
        logits, out = logits.contiguous(), torch.empty(len(logits), dtype=torch.int64)
        self.library.draw_tokens(logits.data_ptr(), settings.data_ptr(), out.data_ptr(), *logits.shape)
        return out
