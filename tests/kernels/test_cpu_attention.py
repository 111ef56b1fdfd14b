"""The CPU backend against plain softmax attention in float64, on ragged batches of every shape it treats apart."""

import numpy as np
import pytest
import torch

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu import LONGEST_BUCKETED_CHUNK, CpuAttention

BLOCK_SIZE = 8
NUM_BLOCKS = 300


class Layout:
    """Builds an AttentionBatch from (prefix length, [(rows, own tokens), ...]) groups."""

    def __init__(self, groups: list[tuple[int, list[tuple[int, int]]]], block_ids: list[int]) -> None:
        free = list(block_ids)
        starts: dict[str, list[int]] = {"query": [0], "own": [0], "group": [0], "prefix": [0]}
        self.own_tables: list[list[int]] = []
        self.prefix_tables: list[list[int]] = []
        own_lens, prefix_lens = [], []

        def take(num_tokens: int) -> list[int]:
            count = -(-num_tokens // BLOCK_SIZE)
            table, free[:] = free[:count], free[count:]
            assert len(table) == count
            return table

        for prefix_len, sequences in groups:
            self.prefix_tables.append(take(prefix_len))
            prefix_lens.append(prefix_len)
            for num_rows, own_len in sequences:
                self.own_tables.append(take(own_len))
                own_lens.append(own_len)
                starts["query"].append(starts["query"][-1] + num_rows)
                starts["own"].append(starts["own"][-1] + len(self.own_tables[-1]))
            starts["group"].append(len(own_lens))
            starts["prefix"].append(starts["prefix"][-1] + len(self.prefix_tables[-1]))

        def int32(values: list[int]) -> np.ndarray:
            return np.array(values, dtype=np.int32)

        self.batch = AttentionBatch(
            query_starts=int32(starts["query"]),
            own_lens=int32(own_lens),
            own_block_starts=int32(starts["own"]),
            own_block_ids=int32([block for table in self.own_tables for block in table]),
            group_starts=int32(starts["group"]),
            prefix_lens=int32(prefix_lens),
            prefix_block_starts=int32(starts["prefix"]),
            prefix_block_ids=int32([block for table in self.prefix_tables for block in table]),
            slot_mapping=np.arange(starts["query"][-1], dtype=np.int64),
            block_size=BLOCK_SIZE,
        )

    def expected(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
        """Row by row, in float64."""
        batch, out = self.batch, torch.empty_like(query, dtype=torch.float64)
        repeat = query.shape[1] // keys.shape[2]
        for group in range(batch.num_groups):
            prefix = self.slots(self.prefix_tables[group], int(batch.prefix_lens[group]))
            for sequence in range(batch.group_starts[group], batch.group_starts[group + 1]):
                first, last = batch.query_starts[sequence : sequence + 2]
                own = self.slots(self.own_tables[sequence], int(batch.own_lens[sequence]))
                for row in range(first, last):
                    seen = prefix + own[: len(own) - (last - first) + (row - first) + 1]
                    key = keys.flatten(0, 1)[seen].double().repeat_interleave(repeat, 1)
                    value = values.flatten(0, 1)[seen].double().repeat_interleave(repeat, 1)
                    weight = (torch.einsum("hd,thd->ht", query[row].double(), key) * scale).softmax(-1)
                    out[row] = torch.einsum("ht,thd->hd", weight, value)
        return out

    @staticmethod
    def slots(table: list[int], length: int) -> list[int]:
        return [table[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE for token in range(length)]


LONG = LONGEST_BUCKETED_CHUNK + 5
BATCHES = {
    "one decode token": [(0, [(1, 1)])],
    "decode only, uneven": [(0, [(1, n) for n in (1, 7, 8, 9, 40, 41)])],
    "prefix of one token": [(1, [(1, 1), (1, 20)])],
    "prefix at block ends": [(p, [(1, 3), (1, 9)]) for p in (BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1)],
    "short chunks": [(10, [(1, 1), (2, 2), (3, 11), (7, 7), (LONGEST_BUCKETED_CHUNK, LONGEST_BUCKETED_CHUNK)])],
    "long chunk, whole": [(0, [(LONG, LONG)])],
    "long chunk, continued": [(0, [(LONG, LONG + n) for n in (1, 8, 13)])],
    "long chunk below a prefix": [(30, [(LONG, LONG), (LONG, LONG + 21), (1, 4)])],
    "everything": [
        (50, [(1, 5), (1, 30), (4, 4), (LONG, LONG)]),
        (0, [(1, 12), (6, 9)]),
        (17, [(1, 1)] * 7),
        (0, [(LONG, LONG + 40)]),
    ],
}


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (7, 1)], ids=lambda heads: f"{heads[0]}q{heads[1]}kv")
@pytest.mark.parametrize("is_scattered", [False, True], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("name", BATCHES)
def test_every_row_attends_to_its_prefix_and_its_own_past(
    name: str, is_scattered: bool, heads: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(len(name))
    num_q_heads, num_kv_heads = heads
    block_ids = torch.randperm(NUM_BLOCKS, generator=generator).tolist() if is_scattered else list(range(NUM_BLOCKS))
    layout = Layout(BATCHES[name], block_ids)
    cache_shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, 16)
    keys, values = (torch.randn(cache_shape, generator=generator) for _ in range(2))
    # A strided query, as the model's projection gives it.
    query = torch.randn(num_q_heads, layout.batch.num_rows, 16, generator=generator).transpose(0, 1)
    backend = CpuAttention(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=16, dtype=torch.float32)
    out = backend.attend(query, keys, values, backend.prepare(layout.batch), scale=0.3)
    assert out.shape == query.shape
    assert (out - layout.expected(query, keys, values, 0.3)).abs().max() < 5e-6


def test_bfloat16_stays_within_its_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    layout = Layout(BATCHES["everything"], list(range(NUM_BLOCKS)))
    keys, values = (torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, 64, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(layout.batch.num_rows, 6, 64, generator=generator).bfloat16()
    backend = CpuAttention(num_q_heads=6, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    out = backend.attend(query, keys, values, backend.prepare(layout.batch), scale=0.125)
    assert (out.double() - layout.expected(query, keys, values, 0.125)).abs().max() < 2e-2


def test_unused_blocks_are_never_read_into_an_answer() -> None:
    """Blocks of nobody, and slots beyond a sequence's end, hold values that would swamp any answer."""
    layout = Layout(BATCHES["everything"], list(range(NUM_BLOCKS)))
    used = {
        slot
        for table, length in [
            *zip(layout.own_tables, layout.batch.own_lens, strict=True),
            *zip(layout.prefix_tables, layout.batch.prefix_lens, strict=True),
        ]
        for slot in layout.slots(table, int(length))
    }
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.full((NUM_BLOCKS, BLOCK_SIZE, 2, 16), 1e6) for _ in range(2))
    for cache in (keys, values):
        cache.flatten(0, 1)[sorted(used)] = torch.randn(len(used), 2, 16, generator=generator)
    query = torch.randn(layout.batch.num_rows, 4, 16, generator=generator)
    backend = CpuAttention(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    out = backend.attend(query, keys, values, backend.prepare(layout.batch), scale=0.25)
    assert (out - layout.expected(query, keys, values, 0.25)).abs().max() < 5e-6


def test_written_rows_land_in_their_slots() -> None:
    layout = Layout([(0, [(3, 3)])], [0])
    keys, values = (torch.zeros(4, BLOCK_SIZE, 2, 16) for _ in range(2))
    new_keys, new_values = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    backend = CpuAttention(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    backend.write_kv(new_keys, new_values, keys, values, backend.prepare(layout.batch))
    assert torch.equal(keys.flatten(0, 1)[:3], new_keys)
    assert torch.equal(values.flatten(0, 1)[:3], new_values)
    assert keys.flatten(0, 1)[3:].abs().max() == 0
