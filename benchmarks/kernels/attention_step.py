"""Steps for comparing attention kernels: the grid of BatchLLM's Fig. 8, and its tensors."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.kernels.attention_batches import GroupSize, make_batch
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.reference import own_tokens, paged_attention_ref, prefix_tokens
from engine.kernels.scoring import Scoring

HEADS = {"Llama-3-8B": (32, 8, 128), "Qwen2-7B": (28, 4, 128)}
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One point of the grid. num_members divides num_decode; the prefill chunks have prefixes of their own."""

    model: str
    prefix_len: int
    own_len: int
    num_members: int
    num_decode: int
    num_prefill: int
    prefill_rows: int

    @property
    def name(self) -> str:
        return (
            f"{self.model} prefix-{self.prefix_len} own-{self.own_len} members-{self.num_members} "
            f"decode-{self.num_decode} prefill-{self.num_prefill}x{self.prefill_rows}"
        )

    def groups(self) -> list[GroupSize]:
        decode = GroupSize(prefix_len=self.prefix_len, members=[(self.own_len, 1)] * self.num_members)
        prefill = GroupSize(prefix_len=self.prefix_len, members=[(self.prefill_rows, self.prefill_rows)])
        return [decode] * (self.num_decode // self.num_members) + [prefill] * self.num_prefill


def grid() -> Iterator[Case]:
    for model in HEADS:
        for num_decode, num_prefill in ((32, 0), (256, 0), (256, 7)):
            for prefix_len in (256, 1024, 4096):
                for own_len in (128, 512, 2048):
                    for num_members in (4, 16, num_decode):
                        yield Case(
                            model=model, prefix_len=prefix_len, own_len=own_len, num_members=num_members,
                            num_decode=num_decode, num_prefill=num_prefill, prefill_rows=256,
                        )  # fmt: skip


CHECK_SIZES = (
    *((40, 9, 2, 4, 2, 5), (264, 9, 16, 16, 1, 256), (2056, 9, 2, 2, 0, 0), (2056, 9, 2, 2, 1, 32)),
    (264, 21, 16, 1024, 0, 0),
)
"""Prefix, own part, members, decode requests, prefill chunks and their rows: too short to share; prefill behind a
prefix (wide tiles) beside a large group; a long prefix with few rows (many splits); both at once; and many short own
parts (packed tiles) behind the prefixes of groups of 16."""


TINY_CASE = Case(
    model="Qwen2-7B", prefix_len=16, own_len=4, num_members=2, num_decode=2, num_prefill=0, prefill_rows=1
)  # fmt: skip
"""Computed by Triton's interpreter in a moment."""


def check_cases() -> Iterator[Case]:
    """Small cases that cover every kind of tile, and merges of two and of many parts."""
    for prefix_len, own_len, num_members, num_decode, num_prefill, prefill_rows in CHECK_SIZES:
        yield Case(
            model="Qwen2-7B", prefix_len=prefix_len, own_len=own_len, num_members=num_members,
            num_decode=num_decode, num_prefill=num_prefill, prefill_rows=prefill_rows,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A case's tensors, and the least work of any implementation.

    Attributes:
        num_bytes: each KV token once, queries, outputs.
        num_flops: two products over the KV that each row attends to.
    """

    case: Case
    batch: AttentionBatch
    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    num_bytes: int
    num_flops: int

    @classmethod
    def make(cls, case: Case, device: torch.device) -> "Step":
        num_q_heads, num_kv_heads, head_dim = HEADS[case.model]
        batch, num_blocks = make_batch(case.groups(), BLOCK_SIZE)
        options = {"dtype": torch.bfloat16, "device": device}
        query = torch.randn(batch.num_rows, num_q_heads, head_dim, **options)
        caches = [torch.randn(num_blocks, BLOCK_SIZE, num_kv_heads, head_dim, **options) for _ in range(2)]
        rows = np.diff(batch.cu_seqlens_q).astype(np.int64)
        prefixes = batch.prefix_lens[np.repeat(np.arange(batch.num_groups), np.diff(batch.group_starts))]
        seen = rows * (prefixes + batch.suffix_lens - rows) + rows * (rows + 1) // 2
        num_kv_tokens = int(batch.suffix_lens.sum() + batch.prefix_lens.sum())
        return cls(
            case=case, batch=batch, query=query, k_cache=caches[0], v_cache=caches[1],
            num_bytes=2 * query.nbytes + 2 * num_kv_tokens * num_kv_heads * head_dim * query.itemsize,
            num_flops=4 * int(seen.sum()) * num_q_heads * head_dim,
        )  # fmt: skip

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def expected(self) -> torch.Tensor:
        """The result in float64."""
        query, k_cache, v_cache = (values.double() for values in (self.query, self.k_cache, self.v_cache))
        return paged_attention_ref(query, k_cache, v_cache, self.batch, Scoring(scale=self.scale))

    def parts(self, cache: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The KV ``[length, num_kv_heads, head_dim]`` of every prefix, and of every sequence's own part."""
        batch = self.batch
        return (
            [prefix_tokens(cache, batch, group) for group in range(batch.num_groups)],
            [own_tokens(cache, batch, sequence) for sequence in range(len(batch.suffix_lens))],
        )
