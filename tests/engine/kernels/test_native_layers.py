"""Layers in one call are, bit by bit, what the kernels make of them one after the other."""

import numpy as np
import pytest
import torch

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu.native import PackedWeight
from engine.kernels.cpu.native_layers import NativeBackend, PackedLayers
from engine.kernels.decoder_layer import LayerWeights, Linear
from engine.scheduling.token_batch import ChunkGroup, Chunks, build_token_batch

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, DIM, BLOCK_SIZE = 96, 160, 4, 2, 32, 32
EPSILON, SCALE = 1e-5, 0.2


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> NativeBackend:
    made = NativeBackend(
        has_layers=True,
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.bfloat16,
        block_size=BLOCK_SIZE,
        folder=tmp_path_factory.mktemp("kernels"),
    )
    if not made.has_products:
        assert made.pack(torch.ones(32, 32).bfloat16()) is None
        pytest.skip("this CPU does not multiply bf16: layers are never packed")
    return made


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
def test_layers_in_one_call(num_suffix: int, has_extras: bool, has_output_rows: bool, kernels: NativeBackend) -> None:
    generator = torch.Generator().manual_seed(num_suffix)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).bfloat16()

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
            scale=SCALE,
            window=window,
        )

    layers = [draw_layer(), draw_layer(window=20)]
    work = kernels.prepare(batch_of(num_suffix))
    num_rows = len(work.slots)
    angles = torch.randn(num_rows, DIM // 2, generator=generator).repeat(1, 2)
    rotation = angles.cos(), angles.sin()
    hidden = draw(num_rows, HIDDEN)
    # In no order, and one of them twice.
    output_rows = torch.tensor([num_rows - 1, 3, 0, 3]) if has_output_rows else None

    def caches() -> list[torch.Tensor]:
        shape = (int(work.slots.max()) // BLOCK_SIZE + 1, BLOCK_SIZE, KV_HEADS, DIM)
        return [torch.zeros(shape, dtype=torch.bfloat16) for _ in layers]

    def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeight:
        packed = kernels.pack(weight, bias)
        assert packed is not None
        return packed

    def step_by_step(layer: LayerWeights, hidden: torch.Tensor, index: int) -> torch.Tensor:
        kv = expected_keys[index], expected_values[index]
        heads = kernels.project(kernels.rms_norm(hidden, layer.attention_norm, EPSILON), pack(*layer.qkv))
        norms = {"q_norm": layer.q_norm, "k_norm": layer.k_norm}
        kernels.rotate_and_write_kv(heads, *rotation, *kv, work, **norms, epsilon=EPSILON)
        query = heads.view(num_rows, -1, DIM)[:, :HEADS]
        attended = kernels.attend(query, *kv, work, scale=SCALE, window=layer.window).flatten(1)
        if output_rows is not None and index == len(layers) - 1:
            attended, hidden = kernels.copy_rows(attended, output_rows), kernels.copy_rows(hidden, output_rows)
        hidden = kernels.project(attended, pack(*layer.output), hidden)
        gate_up = kernels.pack_gated(layer.gate, layer.up)
        assert gate_up is not None
        gated = kernels.project(kernels.rms_norm(hidden, layer.mlp_norm, EPSILON), gate_up)
        return kernels.project(gated, pack(layer.down), hidden)

    expected, expected_keys, expected_values = hidden, caches(), caches()
    for index, layer in enumerate(layers):
        expected = step_by_step(layer, expected, index)

    packed = kernels.make_layers(iter(layers))
    assert isinstance(packed, PackedLayers)
    for _ in range(2):  # the second time on what the first one left in scratch memory
        keys, values = caches(), caches()
        out = packed(hidden.clone(), keys, values, work, *rotation, output_rows)
        assert torch.equal(out, expected)
        written, wanted = (*keys, *values), (*expected_keys, *expected_values)
        assert all(torch.equal(*pair) for pair in zip(written, wanted, strict=True))
