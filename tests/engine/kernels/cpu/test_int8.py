"""Int8 kernels: right within what bytes keep, and the same bits on every unit, thread count and arrangement of KV."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kernels.cpu.int8 import CHUNK_TOKENS, Int8Backend, Int8OutputLayer
from engine.kernels.cpu.int8_weights import PackedInt8, channel_factors, columns_in_pieces, spread, spread_group
from engine.kernels.cpu.native_build import load_library
from engine.kernels.scoring import Scoring
from engine.kernels.torch_output_layer import mask_logits
from tests.engine.kernels.compiled_units import PLAIN, VECTORS, compiled
from tests.engine.kernels.ragged_batches import CPU_FLAGS, NATIVE_BATCHES, Layout

BLOCK_SIZE = 64
NUM_BLOCKS = 100
UNITS = {"best": "", "plain": PLAIN}
"""Compiler flags that leave out what this CPU has; what is compiled otherwise gives the same bits, too."""
if "amx_int8" in CPU_FLAGS:
    UNITS["vectors"] = VECTORS
if "avx512_vnni" in CPU_FLAGS and "avx_vnni" in CPU_FLAGS:
    UNITS["short vectors"] = f"{VECTORS} -mno-avx512vnni"
if "avx512_vnni" in CPU_FLAGS:
    UNITS["pairs"] = f"{VECTORS} -mno-avx512vnni -mno-avxvnni"


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    """Where the kernels lie, compiled for each of `UNITS`."""
    return {units: compiled(flags, "int8") for units, flags in UNITS.items()}


def backend_of(folder: Path, heads: tuple[int, int], head_dim: int) -> Int8Backend:
    return Int8Backend(
        num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, block_size=BLOCK_SIZE, folder=folder
    )


def rounded(x: torch.Tensor, scale_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What bytes keep of heads ``[..., head_dim]``."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).to(scale_dtype).float()
    return (x / scale).round().clamp(-127, 127) * scale


def spread_matrix(size: int) -> torch.Tensor:
    """Of `spread`, float32 ``[size, size]``: a Hadamard matrix for each group."""
    matrix = torch.ones(1, 1)
    while len(matrix) < spread_group(size):
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return torch.block_diag(*[matrix] * (size // len(matrix)))


def attend(
    backend: Int8Backend, layout: Layout, used: list[int], keys: torch.Tensor, values: torch.Tensor, qkv: torch.Tensor
) -> torch.Tensor:
    """Writes the used slots' KV into caches full of what would swamp any answer, and attends."""
    work = backend.prepare(layout.batch)
    shape = (NUM_BLOCKS, BLOCK_SIZE, backend.num_kv_heads, backend.head_dim + 2)
    k_cache, v_cache = (torch.full(shape, 0x46, dtype=torch.int8) for _ in range(2))  # scales of 12,000
    new_keys, new_values = (kv.flatten(0, 1)[used] for kv in (keys, values))
    backend.write_kv(
        new_keys, new_values, k_cache, v_cache, backend.prepare(replace(layout.batch, slot_mapping=np.array(used)))
    )
    query = qkv.view(len(qkv), -1, backend.head_dim)[:, : backend.num_q_heads]
    return backend.attend(query, k_cache, v_cache, work, Scoring(scale=0.2))


@pytest.mark.parametrize(("heads", "head_dim"), [((9, 3), 64), ((7, 1), 96), ((16, 1), 128)])
@pytest.mark.parametrize("name", NATIVE_BATCHES)
def test_rows_attend_to_their_prefix_and_their_own_past(
    name: str, heads: tuple[int, int], head_dim: int, folders: dict[str, Path]
) -> None:
    generator = torch.Generator().manual_seed(len(name))
    block_ids = torch.randperm(NUM_BLOCKS, generator=generator).tolist()
    layout = Layout(NATIVE_BATCHES[name], block_ids, BLOCK_SIZE)
    shape = (NUM_BLOCKS, BLOCK_SIZE, heads[1], head_dim)
    keys, values = (torch.randn(shape, generator=generator).bfloat16() for _ in range(2))
    qkv = torch.randn(layout.batch.num_rows, (heads[0] + 2 * heads[1]) * head_dim, generator=generator).bfloat16()
    used = layout.used_slots()
    found = [
        attend(backend_of(folder, heads, head_dim), layout, used, keys, values, qkv) for folder in folders.values()
    ]
    assert all(torch.equal(other, found[0]) for other in found)
    group, matrix = spread_group(head_dim), spread_matrix(head_dim)
    query = rounded(qkv.view(len(qkv), -1, head_dim)[:, : heads[0]].float() @ matrix) @ matrix / group
    keys = rounded(keys.float() @ matrix, torch.bfloat16) @ matrix / group
    values = rounded(values.float(), torch.bfloat16)
    expected = layout.expected(query, keys, values, 0.2)
    assert (found[0].double() - expected).abs().max() < 2**-7 * expected.abs().max()


def test_a_head_of_zeros_attends_to_what_its_row_sees_alone(folders: dict[str, Path]) -> None:
    """As to the mean of these tokens' values: not to padding, nor to the tokens of later rows."""
    layout = Layout(NATIVE_BATCHES["everything"], list(range(NUM_BLOCKS)), BLOCK_SIZE)
    heads, head_dim = (6, 2), 64
    keys, values = (torch.randn(NUM_BLOCKS, BLOCK_SIZE, heads[1], head_dim).bfloat16() for _ in range(2))
    qkv = torch.zeros(layout.batch.num_rows, (heads[0] + 2 * heads[1]) * head_dim).bfloat16()
    keys, values = (rounded(kv.float(), torch.bfloat16) for kv in (keys, values))
    expected = layout.expected(torch.zeros(len(qkv), heads[0], head_dim), keys, values, 0.2)
    for folder in folders.values():
        used = layout.used_slots()
        found = attend(backend_of(folder, heads, head_dim), layout, used, keys.bfloat16(), values.bfloat16(), qkv)
        assert (found.double() - expected).abs().max() < 2**-7 * expected.abs().max()


@pytest.mark.parametrize("num_own", [1, 40, 130])
@pytest.mark.parametrize("num_prefix", [1, 33, CHUNK_TOKENS - 1, CHUNK_TOKENS, 2 * CHUNK_TOKENS + 50])
def test_an_answer_is_the_same_wherever_the_prefix_ends(
    num_prefix: int, num_own: int, folders: dict[str, Path]
) -> None:
    """Shared or not, alone or with others, on one thread or two: rows are bit for bit what they are on their own."""
    generator = torch.Generator().manual_seed(num_prefix)
    backend, num_tokens, num_members = backend_of(folders["best"], (6, 2), 64), num_prefix + num_own, 5
    keys, values = (torch.randn(num_tokens, 2, 64, generator=generator).bfloat16() for _ in range(2))
    row = torch.randn(1, 10 * 64, generator=generator).bfloat16()

    def answers(groups: list[tuple[int, list[tuple[int, int]]]]) -> torch.Tensor:
        """Of last rows; every sequence has the same tokens."""
        layout = Layout(groups, torch.randperm(NUM_BLOCKS, generator=generator).tolist(), BLOCK_SIZE)
        k, v = (torch.zeros(NUM_BLOCKS, BLOCK_SIZE, 2, 64).bfloat16() for _ in range(2))
        prefix_len, sequences = groups[0]
        tables = [(layout.prefix_tables[0], 0, prefix_len)]
        tables += [(table, prefix_len, own) for table, (_, own) in zip(layout.own_tables, sequences, strict=True)]
        for table, first, length in tables:
            slots = layout.slots(table, length)
            k.flatten(0, 1)[slots], v.flatten(0, 1)[slots] = (
                keys[first : first + length],
                values[first : first + length],
            )
        rows = row.expand(layout.batch.num_rows, -1).contiguous()
        found = attend(backend, layout, layout.used_slots(), k, v, rows)
        return found[layout.batch.cu_seqlens_q[1:] - 1]

    alone = answers([(0, [(1, num_tokens)])])
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        shared = answers([(num_prefix, [(1, num_own)] * num_members)])
        mixed = answers([(num_prefix, [(1, num_own), (num_own, num_own), (1, num_own)])])
        whole = answers([(0, [(min(70, num_tokens), num_tokens)])])
        assert torch.equal(shared, alone.expand_as(shared))
        assert torch.equal(mixed, alone.expand_as(mixed))
        assert torch.equal(whole, alone)


def test_of_equal_columns_the_first_counts_whichever_thread_finds_it(folders: dict[str, Path]) -> None:
    """A thread that is done with its columns helps with others, which may be lower."""
    torch.set_num_threads(4)
    for folder in folders.values():
        head = Int8OutputLayer(load_library(folder, "int8"), torch.zeros(1 << 16, 32), None, torch.ones(32).double())
        for _ in range(30):
            assert not head.most_likely(torch.zeros(3, 32, dtype=torch.bfloat16)).any()
    torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "depth"),
    [*((rows, size, 96) for rows in (1, 12, 33, 300) for size in (512, 500)), (33, 512, 8256), (300, 1056, 8256)],
)
def test_the_output_layer(num_rows: int, vocab_size: int, depth: int, folders: dict[str, Path]) -> None:
    """Logits, the largest, columns and weights agree; vocabularies that fill panels of 32, and one that does not.

    Tiles take a depth of 8,256 in three pieces. Of 1,056 columns the weights are large: see `test_deep_products`.
    """
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(vocab_size, depth, generator=generator)
    weight[400:420] = weight[100:120]  # of equals, the first one counts
    bias = torch.randn(vocab_size, generator=generator) - 3
    bias[400:420] = bias[100:120]
    energy = torch.ones(depth, dtype=torch.float64)
    energy[5::50] = 64
    hidden = (torch.randn(num_rows, depth, generator=generator) * energy.sqrt().float()).bfloat16()
    hidden[0] = 0
    for addend in (None, bias):
        expected = hidden.double() @ weight.double().T + (0 if addend is None else addend.double())
        kept = []
        for folder in folders.values():
            head = Int8OutputLayer(load_library(folder, "int8"), weight, addend, energy)
            logits = head.logits(hidden)
            assert (logits.double() - expected).abs().max() <= 0.02 * expected.abs().max()
            assert torch.equal(head.most_likely(hidden), logits.argmax(-1))
            allowed = torch.zeros(num_rows, -(-vocab_size // 32), dtype=torch.int32)
            allowed[:, 4], allowed[num_rows // 2, 0] = 0b1010, 1
            assert torch.equal(head.most_likely(hidden, allowed), mask_logits(logits, allowed).argmax(-1))
            some = torch.tensor([3, vocab_size - 1, 0, 3])
            assert torch.equal(head.label_logits(hidden, some), logits[:, some])
            assert (head.weights_of(some).float() - weight[some]).abs().max() < 0.02 * weight.abs().max()
            kept.append(logits)
        assert all(torch.equal(other, kept[0]) for other in kept)
        torch.set_num_threads(1)
        assert torch.equal(kept[0][-1:], head.logits(hidden[-1:]))
        torch.set_num_threads(2)


@pytest.mark.parametrize(("depth", "group"), [(576, 64), (1536, 256), (160, 32), (48, 16)])
@pytest.mark.parametrize("num_columns", [1, 16, 43])
def test_columns_are_spread_over_groups_of_neighbours(
    depth: int, group: int, num_columns: int, folders: dict[str, Path]
) -> None:
    columns = torch.randn(depth, num_columns, generator=torch.Generator().manual_seed(group))
    before, matrix = columns.clone(), spread_matrix(depth)
    assert torch.equal(matrix @ matrix, group * torch.eye(depth))
    found = []
    for folder in folders.values():
        torch.set_num_threads(1 + len(found) % 2)
        found.append(spread(load_library(folder, "int8"), columns))
    assert all(torch.equal(other, found[0]) for other in found)
    torch.testing.assert_close(found[0].double(), matrix.double() @ columns.double(), rtol=1e-5, atol=1e-4)
    assert torch.equal(columns, before)


@pytest.mark.parametrize("depth", [576, 1536])
def test_errors_hardly_meet_large_channels_and_large_weights(depth: int, folders: dict[str, Path]) -> None:
    """Of the weights and of their input, with the factors of `channel_factors` and without them."""
    num_columns = 80
    generator = torch.Generator().manual_seed(depth)
    energy = torch.ones(depth, dtype=torch.float64)
    energy[::150] = 256
    weight = torch.randn(num_columns, depth, generator=generator)
    weight[:, 1::100] *= 9
    rows = torch.randn(200, depth, generator=generator) * energy.sqrt().float()
    errors = []
    for factors in (torch.ones(depth), channel_factors(weight, energy)):
        found = []
        for folder in folders.values():
            torch.set_num_threads(1 + len(found) % 2)
            library = load_library(folder, "int8")
            found.append(PackedInt8(library, columns_in_pieces(library, weight, 1 / factors), None))
        bytes_, scales = found[0].columns(torch.arange(num_columns))
        assert all(torch.equal(other.panels, found[0].panels) for other in found)
        kept = bytes_ * scales.unsqueeze(1)
        assert (spread(library, kept.T).T * factors - weight).square().mean().sqrt() < 0.02
        inputs = rounded(spread(library, (rows * factors).T).T)
        products, exact = inputs @ kept.T, rows @ weight.T
        errors.append((products - exact).square().mean())
    assert errors[1] < 0.5 * errors[0]


def test_factors_balance_channels_and_stay_within_bounds() -> None:
    weight, energy = torch.ones(64, 256), torch.ones(256, dtype=torch.float64)
    weight[:, 0], weight[:, 1], energy[2], energy[3] = 16, 0, 256, 0
    factors = channel_factors(weight, energy)
    assert torch.equal(factors[4:], factors[4].expand(252))
    assert factors[0] / factors[4] == 4, "the fourth root of 16^2"
    assert factors[2] / factors[4] == 0.25
    floor = 16 / float(energy.mean())  # a channel that random states miss counts as a sixteenth of the mean
    assert float(factors[3] / factors[4]) == pytest.approx(floor**0.25, rel=0.1)
    assert factors.isfinite().all()
    assert (factors > 0).all()
    norm = torch.ones(256)
    norm[5] = 1 / 16
    assert channel_factors(weight, energy, norm)[5] / factors[5] == 0.25, "the norm's weight is part of the product's"
