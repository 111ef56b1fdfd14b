"""The decoder layers and the output layer on the CPU kernels, and the attention backend that brings them."""

import ctypes
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch

from engine.kernels import cdiv
from engine.kernels.cpu.native import NativeKernels, PackedWeight, lay_together
from engine.kernels.cpu.native_operations import NativeOperations
from engine.kernels.cpu.native_work import TILE_ROWS, AttentionShape, NativeWork
from engine.kernels.decoder_layer import DECODER_LAYER, DecoderLayers, LayerWeights, TabledWork
from engine.kernels.output_layer import columns_in_float64

_POINTER, _I64, _I32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class NativeBackend(NativeOperations):
    """The CPU kernels as an `engine.kernels.attention_backend.AttentionBackend`.

    Args:
        has_layers: whether these layers compute what the model's do; else `make_layers` has none.
        shape: see `NativeKernels`.
    """

    name = "native"
    graphable = None
    has_final_norm = False
    label_columns = staticmethod(columns_in_float64)

    def __init__(self, *, has_layers: bool, **shape: Any) -> None:
        super().__init__(**shape)
        self._has_layers = has_layers

    def scratch_bytes(self, num_rows: int) -> int:
        """None of a GPU."""
        return 0

    def make_layers(self, weights: Iterable[LayerWeights]) -> DecoderLayers | None:
        """Layers in one C++ call, or with torch's products where the kernels have none for them.

        Args:
            weights: taken one after the other, so that the caller can free each layer before the next one is copied.
        """
        if not self._has_layers:
            return None
        packed: list[PanelLayer] = []
        remaining = iter(weights)
        for layer in remaining:
            found = _pack(self, layer)
            if found is None:
                from engine.kernels.cpu.unpacked_layer import make_unpacked_layer  # most layers are packed
                from engine.kernels.layer_by_layer import LayerByLayer

                assert not packed, "layers of different shapes"
                return LayerByLayer(make_unpacked_layer(self, each) for each in chain([layer], remaining))
            packed.append(found)
        return PackedLayers(self, self.kernel("compute_layers"), packed, dtype=self.dtype)

    def make_output_layer(self, weight: torch.Tensor, bias: torch.Tensor | None) -> "PackedOutputLayer | None":
        """The output layer with packed weights; None where only torch multiplies them."""
        packed = self.pack(weight, bias)
        return None if packed is None else PackedOutputLayer(self, packed)


class PackedOutputLayer:
    """An output layer (`engine.kernels.attention_backend.OutputLayer`) with packed weights."""

    def __init__(self, kernels: NativeBackend, packed: PackedWeight) -> None:
        self._kernels = kernels
        self._packed = packed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._kernels.project(self._kernels.copy_rows(hidden), self._packed)

    def most_likely(self, hidden: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """Without writing the logits."""
        return self._kernels.largest_column(self._kernels.copy_rows(hidden), self._packed, allowed)

    def label_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        bias = None if self._packed.bias is None else self._packed.bias[token_ids]
        return self._kernels.label_columns(hidden, self.weights_of(token_ids), bias)

    def weights_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._packed.columns(token_ids.flatten()).view(*token_ids.shape, -1)


NORMS = ("attention_norm", "q_norm", "k_norm", "mlp_norm")
PRODUCTS = ("qkv", "output", "gate_up", "down")
LAYER_SIZES: tuple[tuple[str, Any], ...] = (
    *((name, _I64) for name in ("hidden_size", "intermediate_size")),
    *((name, _I32) for name in ("num_q_heads", "num_kv_heads", "dim", "block_size", "window")),
    *((name, _FLOAT) for name in ("epsilon", "scale")),
    *((name, _I32) for name in ("rotation", "table")),
    ("branches", _POINTER),
)
"""Fields of a layer's weights in cpp/layer.h; each product's are those of its format."""

_STEP_ARRAYS = ("cos", "sin", "slots", "shared", "own", "prefix_blocks", "own_blocks", "own_seen", "state")
_SCRATCH = ("normed", "qkv", "attended", "gated", "bytes", "scales", "branch", "expert_rows", "expert_gated")


class PackedLayer(ctypes.Structure):
    """`LayerWeights` as cpp/layer.h has them; gate and up are one product."""

    tensors: tuple[torch.Tensor | None, ...]  # what the addresses point into
    operations: Sequence[int] = range(len(DECODER_LAYER))  # their numbers in cpp/layer.h
    num_branch_columns: tuple[int, ...] = ()  # of the scratch from `bytes` on, where there are branches
    kept: object  # what `branches` points to
    hidden_size: int
    intermediate_size: int


class PanelLayer(PackedLayer):
    """In bf16 or float32: panels and a bias for each product."""

    products: tuple[object, ...]  # quantized ones, see `engine.kernels.cpu.quantized`

    _fields_ = (
        *((name, _POINTER) for name in NORMS),
        *((f"{name}_{part}", _POINTER) for name in PRODUCTS for part in ("panels", "bias")),
        *LAYER_SIZES,
    )


class _LayerStep(ctypes.Structure):
    """As cpp/layer.h has it."""

    _fields_ = (
        *((name, _POINTER) for name in _STEP_ARRAYS),
        *((name, _I64) for name in ("num_rows", "num_shared", "num_own")),
        *((name, _POINTER) for name in _SCRATCH),
    )


def _pack(kernels: NativeKernels, layer: LayerWeights) -> PanelLayer | None:
    if not kernels.has_products:
        return None
    is_branched = type(layer) is not LayerWeights
    qkv, output, down = kernels.pack(*layer.qkv), kernels.pack(*layer.output), kernels.pack(layer.down)
    if is_branched:
        from engine.kernels.cpu.branched_layers import complete, pack_gate_up  # few models have such layers
    gate_up = pack_gate_up(kernels, layer) if is_branched else kernels.pack_gated(layer.gate, layer.up)
    if qkv is None or output is None or gate_up is None or down is None:
        return None
    products = lay_together((qkv, output, gate_up, down))
    tensors = (
        *(layer.attention_norm, layer.q_norm, layer.k_norm, layer.mlp_norm),
        *(tensor for product in products for tensor in (product.panels, product.bias)),
    )
    packed = PanelLayer(
        *(None if tensor is None else tensor.data_ptr() for tensor in tensors),
        *(qkv.depth, down.depth),
        *(kernels.num_q_heads, kernels.num_kv_heads, kernels.head_dim, kernels.block_size, layer.window),
        *(layer.epsilon, layer.scale),
    )
    packed.tensors = tensors
    if is_branched:
        complete(packed, layer, kernels)
    return packed


class PackedLayers:
    """`engine.kernels.decoder_layer.DecoderLayers` of one shape as one call of the kernels.

    Args:
        compute: `compute_layers` of the layers' format.
        layers: of that format.
        num_byte_columns: most bytes of a row that the kernels need besides what is in `dtype`.
        dtype: of rows between the products.
    """

    def __init__(
        self,
        shape: AttentionShape,
        compute: Callable[..., None],
        layers: Sequence[PackedLayer],
        num_byte_columns: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self._compute = compute
        self._layers = layers  # keeps their tensors
        operations = layers[0].operations
        self._operations = (_I32 * len(operations))(*operations)
        self._weights = (type(layers[0]) * len(layers))(*layers)
        q_size, kv_size = (heads * shape.head_dim for heads in (shape.num_q_heads, shape.num_kv_heads))
        # Columns of _SCRATCH; in int8, whose rows are in bf16, a float32 scale takes two.
        self._columns: tuple[int, ...] = (
            layers[0].hidden_size,
            q_size + 2 * kv_size,
            q_size,
            layers[0].intermediate_size,
        )
        if num_byte_columns:
            self._columns += (num_byte_columns // 2, 2)
        self._columns += tuple(max(each) for each in zip(*(layer.num_branch_columns for layer in layers), strict=True))
        self._scratch = torch.empty(0, dtype=dtype)

    def __call__(
        self,
        hidden: torch.Tensor,
        k_caches: Sequence[torch.Tensor],
        v_caches: Sequence[torch.Tensor],
        work: NativeWork | TabledWork,
        cos: torch.Tensor,
        sin: torch.Tensor,
        output_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes in place: returns `hidden`, or its first rows."""
        assert hidden.is_contiguous(), "rows that do not lie together"
        num_rows = len(hidden)
        num_tile_rows = cdiv(num_rows, TILE_ROWS) * TILE_ROWS
        sizes = [num_tile_rows * columns for columns in self._columns]
        if self._scratch.numel() < sum(sizes):
            self._scratch = self._scratch.new_empty(sum(sizes))
        works = (work,) if isinstance(work, NativeWork) else work.works
        if not isinstance(work, NativeWork):
            for layer, table in zip(self._weights, work.tables, strict=True):
                layer.table = table
        scratch = [part.data_ptr() for part in torch.split(self._scratch[: sum(sizes)], sizes)]
        steps = (_LayerStep * len(works))()
        for index, each in enumerate(works):
            steps[index] = _LayerStep(cos.data_ptr(), sin.data_ptr(), *_list_work(each, num_rows), *scratch)
        num_output_rows = 0 if output_rows is None else len(output_rows)
        self._compute(
            *(self._weights, len(self._layers), self._operations, len(self._operations), steps, hidden.data_ptr()),
            *(_addresses(k_caches), _addresses(v_caches)),
            *(None if output_rows is None else output_rows.data_ptr(), num_output_rows),
        )
        return hidden if output_rows is None else hidden[:num_output_rows]


def _list_work(work: NativeWork, num_rows: int) -> tuple[int, ...]:
    """Fields of `_LayerStep`, from slots to num_own."""
    arrays = (work.slots, work.shared, work.own, work.prefix_blocks, work.own_blocks, work.own_seen)
    addresses = (array.ctypes.data for array in arrays)
    return (*addresses, work.state.data_ptr(), num_rows, len(work.shared), len(work.own))


def _addresses(tensors: Sequence[torch.Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
