"""A whole decoder layer as one call of the CPU kernels, where they multiply bf16."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.native import TILE_ROWS, NativeKernels, NativeWork, PackedWeight

_POINTER, _I64, _I32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

_WEIGHTS = (
    *("attention_norm", "qkv", "qkv_bias", "q_norm", "k_norm"),
    *("output", "output_bias", "mlp_norm", "gate_up", "down"),
)
_STEP_ARRAYS = ("cos", "sin", "slots", "shared", "own", "prefix_blocks", "own_blocks", "state")
_SCRATCH = ("normed", "qkv", "attended", "gated")


class _LayerWeights(ctypes.Structure):
    """As cpp/layer.h has it."""

    _fields_ = (
        *((name, _POINTER) for name in _WEIGHTS),
        *((name, _I64) for name in ("hidden_size", "intermediate_size")),
        *((name, _I32) for name in ("num_q_heads", "num_kv_heads", "dim", "block_size")),
        *((name, _FLOAT) for name in ("epsilon", "scale")),
    )


class _LayerStep(ctypes.Structure):
    """As cpp/layer.h has it."""

    _fields_ = (
        *((name, _POINTER) for name in _STEP_ARRAYS),
        *((name, _I64) for name in ("num_rows", "num_shared", "num_own")),
        *((name, _POINTER) for name in _SCRATCH),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """What the layers of one step are called with; made once a step.

    Attributes:
        address: of what the kernels read.
        kept: what that points into.
    """

    address: int
    kept: Sequence[Any]


class PackedLayer:
    """A decoder layer's weights in the order in which the kernels read them.

    Args:
        kernels: with products.
        attention_norm, mlp_norm: ``[hidden]``.
        qkv: of query, key and value heads together.
        output: of the attended heads.
        gate_up: gated.
        q_norm, k_norm: ``[head_dim]`` where the family norms its heads.
        epsilon: of every norm.
        scale: applied to the attention's logits.
    """

    def __init__(
        self,
        kernels: NativeKernels,
        *,
        attention_norm: torch.Tensor,
        qkv: PackedWeight,
        output: PackedWeight,
        mlp_norm: torch.Tensor,
        gate_up: PackedWeight,
        down: PackedWeight,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        epsilon: float,
        scale: float,
    ) -> None:
        self._kernels = kernels
        self._hidden_size, self._intermediate_size, self._qkv_size = qkv.depth, down.depth, qkv.num_columns
        weights = (
            *(attention_norm, qkv.panels, qkv.bias, q_norm, k_norm),
            *(output.panels, output.bias, mlp_norm, gate_up.panels, down.panels),
        )
        self._kept = weights
        self._weights = _LayerWeights(
            *(None if weight is None else weight.data_ptr() for weight in weights),
            *(self._hidden_size, self._intermediate_size),
            *(kernels.num_q_heads, kernels.num_kv_heads, kernels.head_dim, kernels.block_size, epsilon, scale),
        )
        self._address = ctypes.addressof(self._weights)

    def call(self, work: NativeWork, cos: torch.Tensor, sin: torch.Tensor) -> LayerCall:
        """What this layer and others of its shape are called with in one step.

        Args:
            cos, sin: float32 ``[T, head_dim]``, contiguous.
        """
        num_rows = len(cos)
        num_tile_rows = -(-num_rows // TILE_ROWS) * TILE_ROWS
        attended_size = self._kernels.num_q_heads * self._kernels.head_dim
        scratch = self._kernels.scratch(
            [num_tile_rows * n for n in (self._hidden_size, self._qkv_size, attended_size, self._intermediate_size)]
        )
        step = _LayerStep(
            *(cos.data_ptr(), sin.data_ptr()),
            *(array.ctypes.data for array in (work.slots, work.shared, work.own, work.prefix_blocks, work.own_blocks)),
            *(work.state.data_ptr(), num_rows, len(work.shared), len(work.own)),
            *(part.data_ptr() for part in scratch),
        )
        return LayerCall(address=ctypes.addressof(step), kept=(step, work, cos, sin, scratch))

    def __call__(
        self,
        call: LayerCall,
        hidden: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the layer in place, and writes the step's KV.

        Args:
            hidden: ``[T, hidden]``, contiguous; overwritten.
            k_cache, v_cache: as for `NativeKernels.attend`.
            output_rows: int64 ``[R]``; nothing but these rows is wanted of the layer.
        Returns:
            ``[T, hidden]``, or ``[R, hidden]``: `hidden`, or its first rows.
        """
        assert hidden.is_contiguous(), "rows that do not lie together"
        num_output_rows = 0 if output_rows is None else len(output_rows)
        self._kernels.compute_layer(
            *(self._address, call.address, hidden.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr()),
            *(None if output_rows is None else output_rows.data_ptr(), num_output_rows),
        )
        return hidden if output_rows is None else hidden[:num_output_rows]
