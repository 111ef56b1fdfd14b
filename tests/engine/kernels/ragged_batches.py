"""Ragged batches of every shape that the CPU kernels treat apart, and plain softmax attention in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu.torch_attention import LONGEST_BUCKETED_CHUNK

BLOCK_SIZE = 8
NO_RULE: dict[str, Any] = {}


class Layout:
    """Builds an AttentionBatch from (prefix length, [(rows, own tokens), ...]) groups."""

    def __init__(
        self, groups: list[tuple[int, list[tuple[int, int]]]], block_ids: list[int], block_size: int = BLOCK_SIZE
    ) -> None:
        self.block_size = block_size
        free = list(block_ids)
        starts: dict[str, list[int]] = {"query": [0], "own": [0], "group": [0], "prefix": [0]}
        self.own_tables: list[list[int]] = []
        self.prefix_tables: list[list[int]] = []
        suffix_lens, prefix_lens = [], []

        def take(num_tokens: int) -> list[int]:
            count = -(-num_tokens // block_size)
            table, free[:] = free[:count], free[count:]
            assert len(table) == count
            return table

        for prefix_len, sequences in groups:
            self.prefix_tables.append(take(prefix_len))
            prefix_lens.append(prefix_len)
            for num_rows, own_len in sequences:
                self.own_tables.append(take(own_len))
                suffix_lens.append(own_len)
                starts["query"].append(starts["query"][-1] + num_rows)
                starts["own"].append(starts["own"][-1] + len(self.own_tables[-1]))
            starts["group"].append(len(suffix_lens))
            starts["prefix"].append(starts["prefix"][-1] + len(self.prefix_tables[-1]))

        def int32(values: list[int]) -> np.ndarray:
            return np.array(values, dtype=np.int32)

        self.batch = AttentionBatch(
            cu_seqlens_q=int32(starts["query"]),
            suffix_lens=int32(suffix_lens),
            suffix_block_starts=int32(starts["own"]),
            suffix_block_table=int32([block for table in self.own_tables for block in table]),
            group_starts=int32(starts["group"]),
            prefix_lens=int32(prefix_lens),
            prefix_block_starts=int32(starts["prefix"]),
            prefix_block_ids=int32([block for table in self.prefix_tables for block in table]),
            slot_mapping=np.arange(starts["query"][-1], dtype=np.int64),
            block_size=block_size,
        )

    def expected(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        rule: dict[str, Any] = NO_RULE,
    ) -> torch.Tensor:
        """Row by row, in float64."""
        softcap, window, sinks = rule.get("softcap", 0), rule.get("window", 0), rule.get("sinks")
        batch, out = self.batch, torch.empty_like(query, dtype=torch.float64)
        repeat = query.shape[1] // keys.shape[2]
        for group in range(batch.num_groups):
            prefix = self.slots(self.prefix_tables[group], int(batch.prefix_lens[group]))
            for sequence in range(batch.group_starts[group], batch.group_starts[group + 1]):
                first, last = batch.cu_seqlens_q[sequence : sequence + 2]
                own = self.slots(self.own_tables[sequence], int(batch.suffix_lens[sequence]))
                for row in range(first, last):
                    seen = (prefix + own[: len(own) - (last - first) + (row - first) + 1])[-window:]
                    key = keys.flatten(0, 1)[seen].double().repeat_interleave(repeat, 1)
                    value = values.flatten(0, 1)[seen].double().repeat_interleave(repeat, 1)
                    scores = torch.einsum("hd,thd->ht", query[row].double(), key) * scale
                    if softcap:
                        scores = softcap * torch.tanh(scores / softcap)
                    if sinks is not None:
                        scores = torch.cat([scores, sinks.double()[:, None]], dim=-1)
                    out[row] = torch.einsum("ht,thd->hd", scores.softmax(-1)[:, : len(seen)], value)
        return out

    def slots(self, table: list[int], length: int) -> list[int]:
        return [table[token // self.block_size] * self.block_size + token % self.block_size for token in range(length)]

    def used_slots(self) -> list[int]:
        """Those that anybody's KV is in."""
        tables = [
            *zip(self.own_tables, self.batch.suffix_lens, strict=True),
            *zip(self.prefix_tables, self.batch.prefix_lens, strict=True),
        ]
        return [slot for table, length in tables for slot in self.slots(table, int(length))]


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


NATIVE_BATCHES = BATCHES | {
    "at sub-block ends": [(p, [(1, n) for n in (31, 32, 33)] + [(40, 63), (40, 64), (40, 65)]) for p in (0, 32, 65)],
    "beyond a chunk of scores": [(300, [(1, 257)] * 3 + [(70, 300)])],
    "one member alone with its prefix": [(40, [(2, 9)]), (33, [(1, 1)])],
}


_CPU_LINES = Path("/proc/cpuinfo").read_text().splitlines()
CPU_FLAGS = next(line for line in _CPU_LINES if line.startswith(("flags", "Features"))).split()
