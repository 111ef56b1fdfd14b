"""All decoder layers as one call of the CPU kernels, where they multiply bf16."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.kernels import cdiv
from engine.kernels.cpu.native import TILE_ROWS, NativeKernels, NativeWork, PackedWeight

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
class PackedLayer:
    """A decoder layer's weights in the order in which the kernels read them.

    Attributes:
        attention_norm, mlp_norm: ``[hidden]``.
        qkv: of query, key and value heads together.
        output: of the attended heads.
        gate_up: gated.
        q_norm, k_norm: ``[head_dim]`` where the family norms its heads.
        epsilon: of every norm.
        scale: applied to the attention's logits.
    """

    attention_norm: torch.Tensor
    qkv: PackedWeight
    output: PackedWeight
    mlp_norm: torch.Tensor
    gate_up: PackedWeight
    down: PackedWeight
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    epsilon: float
    scale: float


class PackedLayers:
    """The decoder layers of a model, which all have one shape.

    Args:
        kernels: with products.
        layers: in their order.
    """

    def __init__(self, kernels: NativeKernels, layers: Sequence[PackedLayer]) -> None:
        self._kernels = kernels
        self._layers = layers  # what the addresses below point into
        self._hidden_size, self._intermediate_size = layers[0].qkv.depth, layers[0].down.depth
        self._qkv_size, self._attended_size = layers[0].qkv.num_columns, layers[0].output.depth
        self._weights = (_LayerWeights * len(layers))(*map(self._addresses, layers))

    def __call__(
        self,
        hidden: torch.Tensor,
        k_caches: Sequence[torch.Tensor],
        v_caches: Sequence[torch.Tensor],
        work: NativeWork,
        cos: torch.Tensor,
        sin: torch.Tensor,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes the layers in place, and writes the step's KV.

        Args:
            hidden: ``[T, hidden]``, contiguous; overwritten.
            k_caches, v_caches: one a layer, as for `NativeKernels.attend`.
            cos, sin: float32 ``[T, head_dim]``, contiguous.
            output_rows: int64 ``[R]``; nothing but these rows is wanted of the last layer.
        Returns:
            ``[T, hidden]``, or ``[R, hidden]``: `hidden`, or its first rows.
        """
        assert hidden.is_contiguous(), "rows that do not lie together"
        num_rows = len(hidden)
        num_tile_rows = cdiv(num_rows, TILE_ROWS) * TILE_ROWS
        sizes = (self._hidden_size, self._qkv_size, self._attended_size, self._intermediate_size)
        scratch = self._kernels.scratch([num_tile_rows * size for size in sizes])
        step = _LayerStep(
            *(cos.data_ptr(), sin.data_ptr()),
            *(array.ctypes.data for array in (work.slots, work.shared, work.own, work.prefix_blocks, work.own_blocks)),
            *(work.state.data_ptr(), num_rows, len(work.shared), len(work.own)),
            *(part.data_ptr() for part in scratch),
        )
        num_output_rows = 0 if output_rows is None else len(output_rows)
        self._kernels.compute_layers(
            *(self._weights, len(self._layers), ctypes.byref(step), hidden.data_ptr()),
            *(_addresses(k_caches), _addresses(v_caches)),
            *(None if output_rows is None else output_rows.data_ptr(), num_output_rows),
        )
        return hidden if output_rows is None else hidden[:num_output_rows]

    def _addresses(self, layer: PackedLayer) -> _LayerWeights:
        kernels = self._kernels
        weights = (
            *(layer.attention_norm, layer.qkv.panels, layer.qkv.bias, layer.q_norm, layer.k_norm),
            *(layer.output.panels, layer.output.bias, layer.mlp_norm, layer.gate_up.panels, layer.down.panels),
        )
        return _LayerWeights(
            *(None if weight is None else weight.data_ptr() for weight in weights),
            *(self._hidden_size, self._intermediate_size),
            *(kernels.num_q_heads, kernels.num_kv_heads, kernels.head_dim, kernels.block_size),
            *(layer.epsilon, layer.scale),
        )


def _addresses(tensors: Sequence[torch.Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
