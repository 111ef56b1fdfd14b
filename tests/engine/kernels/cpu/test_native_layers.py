"""Layers in one call are, bit by bit, what the kernels make of them one after the other."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.branched_layer import BranchedWeights, Experts
from engine.kernels.cpu.native import NativeBackend
from engine.kernels.cpu.native_layers import PackedLayers, PackedWeight
from engine.kernels.decoder_layer import LayerWeights, Linear, TabledWork
from engine.kernels.scoring import Scoring
from engine.model.loading.checkpoint import cache_folder
from engine.scheduling.token_batch import ChunkGroup, Chunks, build_token_batch
from tests.engine.kernels.compiled_units import PLAIN, VECTORS, compiled
from tests.engine.kernels.cpu.native_calls import rms_norm, rotate_and_write_kv
from tests.engine.kernels.ragged_batches import CPU_FLAGS
from tests.engine.kernels.twins import experts_ref

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, BLOCK_SIZE = 96, 160, 4, 2, 32, 32
EPSILON, SCALE = 1e-5, 0.2


def make_kernels(folder: Path, dtype: torch.dtype = torch.bfloat16) -> NativeBackend:
    return NativeBackend(
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=dtype,
        block_size=BLOCK_SIZE,
        folder=folder,
    )


@pytest.fixture(scope="module")
def kernels() -> NativeBackend:
    return make_kernels(cache_folder())


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def kernels_of_a_type(request: pytest.FixtureRequest) -> NativeBackend:
    return make_kernels(cache_folder(), request.param)


def batch_of(num_suffix: int) -> AttentionBatch:
    """A prefix of 40 tokens, and three requests on it that start in the same step."""
    chunks = Chunks()

    def add(first_block: int, num_tokens: int, position: int) -> None:
        blocks = np.arange(first_block, first_block + -(-num_tokens // BLOCK_SIZE), dtype=np.int32)
        chunks.add(np.zeros(num_tokens, dtype=np.int32), position, 0, blocks, 1)

    num_blocks = -(-num_suffix // BLOCK_SIZE)
    add(0, 40, 0)
    for index in range(3):
        add(2 + index * num_blocks, num_suffix, 40)
    groups = [ChunkGroup(np.empty(0, dtype=np.int32), 0, 1), ChunkGroup(np.arange(2, dtype=np.int32), 40, 3)]
    return build_token_batch(chunks, groups, BLOCK_SIZE).attention


@pytest.mark.parametrize("has_output_rows", [False, True], ids=["all rows", "output rows"])
@pytest.mark.parametrize("has_extras", [False, True], ids=["bare", "biases and head norms"])
@pytest.mark.parametrize("num_suffix", [1, 8, 99])
def test_layers_in_one_call(
    num_suffix: int, has_extras: bool, has_output_rows: bool, kernels_of_a_type: NativeBackend
) -> None:
    kernels = kernels_of_a_type
    generator = torch.Generator().manual_seed(num_suffix)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(kernels.dtype)

    def draw_linear(num_columns: int, depth: int) -> Linear:
        return draw(num_columns, depth), draw(num_columns) if has_extras else None

    def draw_layer(window: int = 0) -> LayerWeights:
        return LayerWeights(
            attention_norm=draw(HIDDEN),
            qkv=draw_linear((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            output=draw_linear(HIDDEN, HEADS * DIM),
            mlp_norm=draw(HIDDEN),
            gate=draw(INTERMEDIATE, HIDDEN),
            up=draw(INTERMEDIATE, HIDDEN),
            down=draw(HIDDEN, INTERMEDIATE),
            q_norm=draw(DIM) if has_extras else None,
            k_norm=draw(DIM) if has_extras else None,
            epsilon=EPSILON,
            scoring=Scoring(scale=SCALE, window=window),
        )

    layers = [draw_layer(), draw_layer(window=20)]
    batch = batch_of(num_suffix)
    work = kernels.prepare(batch)
    num_rows = work.num_rows
    angles = torch.randn(num_rows, DIM // 2, generator=generator).repeat(1, 2)
    rotation = angles.cos(), angles.sin()
    hidden = draw(num_rows, HIDDEN)
    # In no order, and one of them twice.
    output_rows = torch.tensor([num_rows - 1, 3, 0, 3]) if has_output_rows else None

    def caches() -> list[torch.Tensor]:
        shape = (int(batch.slot_mapping.max()) // BLOCK_SIZE + 1, BLOCK_SIZE, KV_HEADS, DIM)
        return [torch.zeros(shape, dtype=kernels.dtype) for _ in layers]

    def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
        packed = kernels.pack(weight, bias)
        assert packed is not None
        return packed

    def step_by_step(layer: LayerWeights, hidden: torch.Tensor, index: int) -> torch.Tensor:
        kv = expected_keys[index], expected_values[index]
        heads = kernels.project(rms_norm(kernels, hidden, layer.attention_norm, EPSILON), pack(*layer.qkv))
        norms = {"q_norm": layer.q_norm, "k_norm": layer.k_norm}
        rotate_and_write_kv(kernels, heads, *rotation, *kv, work, **norms, epsilon=EPSILON)
        query = heads.view(num_rows, -1, DIM)[:, :HEADS]
        attended = kernels.attend(query, *kv, work, layer.scoring).flatten(1)
        if output_rows is not None and index == len(layers) - 1:
            attended, hidden = kernels.copy_rows(attended[output_rows]), kernels.copy_rows(hidden[output_rows])
        hidden = kernels.project(attended, pack(*layer.output), hidden)
        gate_up = kernels.pack_gated(layer.gate, layer.up)
        assert gate_up is not None
        gated = kernels.project(rms_norm(kernels, hidden, layer.mlp_norm, EPSILON), gate_up)
        return kernels.project(gated, pack(layer.down), hidden)

    expected, expected_keys, expected_values = hidden, caches(), caches()
    for index, layer in enumerate(layers):
        expected = step_by_step(layer, expected, index)

    packed = kernels.make_layers(iter(layers))
    assert isinstance(packed, PackedLayers)
    for _ in range(2):  # the second time on what the first one left in scratch memory
        keys, values = caches(), caches()
        out = packed(hidden.clone(), (keys, values), TabledWork([work], [0] * len(layers)), rotation, output_rows)
        assert torch.equal(out, expected)
        written, wanted = (*keys, *values), (*expected_keys, *expected_values)
        assert all(torch.equal(*pair) for pair in zip(written, wanted, strict=True))


@pytest.fixture(scope="module")
def kernels_with_fewer_units(kernels_of_a_type: NativeBackend) -> NativeBackend:
    """Without tiles where there are some, and in float32 without vectors of AVX-512."""
    without_tiles = VECTORS if "amx_bf16" in CPU_FLAGS else ""
    dtype = kernels_of_a_type.dtype
    return make_kernels(compiled(PLAIN if dtype == torch.float32 else without_tiles, "native"), dtype)


@pytest.mark.parametrize("fixture", ["kernels_of_a_type", "kernels_with_fewer_units"])
@pytest.mark.parametrize("kind", ["plain", "shared and gated", "biases and limits"])
def test_experts_are_those_of_torch(
    kind: str, fixture: str, kernels_of_a_type: NativeBackend, request: pytest.FixtureRequest
) -> None:
    """More rows than a thread keeps, more columns than one piece of the depth, an expert that no row chooses."""
    kernels: NativeBackend = request.getfixturevalue(fixture)
    generator = torch.Generator().manual_seed(3)
    has_biases = kind == "biases and limits"

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(kernels.dtype)

    def draw_bias(count: int) -> torch.Tensor | None:
        return torch.randn(count, generator=generator).to(kernels.dtype) if has_biases else None

    hidden_size, size, num_experts, num_shared = 2112, 96, 6, 2 if kind == "shared and gated" else 0
    num_all = num_experts + num_shared
    router_bias = torch.tensor([0.0, 0.5, 0, 0, -1e4, 1], dtype=kernels.dtype)
    layer = BranchedWeights(
        attention_norm=torch.ones(hidden_size, dtype=kernels.dtype),
        qkv=(draw((HEADS + 2 * KV_HEADS) * DIM, hidden_size), None),
        output=(torch.zeros(hidden_size, HEADS * DIM, dtype=kernels.dtype), None),  # the same rows reach both routers
        mlp_norm=draw(hidden_size) + 1,
        gate=3 * draw(num_all * size, hidden_size),
        up=3 * draw(num_all * size, hidden_size),
        down=draw(num_all * hidden_size, size),
        gate_bias=draw_bias(num_all * size),
        up_bias=draw_bias(num_all * size),
        down_bias=draw_bias(num_all * hidden_size),
        gate_function="clamped" if has_biases else "silu",
        gate_alpha=1.702,
        gate_limit=2.0,
        q_norm=None,
        k_norm=None,
        epsilon=EPSILON,
        scoring=Scoring(scale=SCALE),
        experts=Experts(
            router=draw(num_experts + (num_shared > 0), hidden_size),
            router_bias=router_bias if has_biases else None,
            num_experts=num_experts,
            num_chosen=3,
            num_shared=num_shared,
            is_renormalised=kind != "shared and gated",
        ),
    )
    batch = batch_of(99)
    work = kernels.prepare(batch)
    num_rows = work.num_rows
    angles = torch.ones(num_rows, DIM), torch.zeros(num_rows, DIM)
    hidden = draw(num_rows, hidden_size)
    shape = (int(batch.slot_mapping.max()) // BLOCK_SIZE + 1, BLOCK_SIZE, KV_HEADS, DIM)
    keys, values = ([torch.zeros(shape, dtype=kernels.dtype)] for _ in range(2))
    packed = kernels.make_layers([layer])
    assert isinstance(packed, PackedLayers)
    expected = hidden + experts_ref(rms_norm(kernels, hidden, layer.mlp_norm, EPSILON), layer)
    # What the experts add is large beside the rows; each rounding of it in bf16 is 1/256 at most.
    most = 0.05 if kernels.dtype == torch.bfloat16 else 1e-5
    # Few of them, all, and none.
    for output_rows in (torch.tensor([7, 0, num_rows - 1]), None, torch.tensor([], dtype=torch.int64)):
        given = hidden.clone()
        out = packed(given, (keys, values), TabledWork([work], [0]), angles, output_rows)
        assert len(out) or torch.equal(given, hidden), "without output rows the last layer is not computed"
        wanted = expected if output_rows is None else expected[output_rows]
        assert out.shape == wanted.shape
        assert len(out) == 0 or (out - wanted).abs().max() < most * wanted.abs().max()
    assert (expected - hidden).abs().max() > 10 * hidden.abs().max()
