"""Decode attention that reads a shared prefix once, compared with a copy per request (RelayAttention 3.4)."""

import statistics
import time
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from benchmarks.kernels.attention_batches import GroupSize, make_batch
from benchmarks.kernels.relay_model import equation_10
from benchmarks.measuring.turns import in_turn
from benchmarks.measuring.wrong_answer import WrongAnswerError
from benchmarks.papers.table import Cell, Plot, Table
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu.layer_structures import NativeWork
from engine.kernels.cpu.native import NativeBackend
from engine.kernels.scoring import Scoring
from engine.model.loading.checkpoint import cache_folder

PREFIX_TOKENS = (128, 256, 512, 1024, 2048)
BATCH_SIZES = (4, 8, 16, 32)
OWN_TOKENS = 128
NUM_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 128, 32
NUM_REPEATS = 15
CACHE_BYTES = 128 * 2**20
"""Size of a buffer written between runs, so that KV comes from memory, as in a model of many layers."""
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One decode step: as a group with a prefix, and as requests that each have a copy of the prefix."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    shared: AttentionBatch
    copied: AttentionBatch

    @classmethod
    def make(cls, num_requests: int, prefix_tokens: int, dtype: torch.dtype) -> "Step":
        """Make both forms, with the same values in their blocks, so that results are equal."""
        shared, num_blocks = make_batch(
            [GroupSize(prefix_len=prefix_tokens, members=[(OWN_TOKENS, 1)] * num_requests)], BLOCK_SIZE
        )
        num_prefix_blocks = len(shared.prefix_block_ids)
        copies = num_blocks + np.arange(num_requests * num_prefix_blocks, dtype=np.int32).reshape(num_requests, -1)
        own = [shared.suffix_block_table[slice(*ends)] for ends in pairwise(shared.suffix_block_starts)]
        tables = [np.concatenate([copy, blocks]) for copy, blocks in zip(copies, own, strict=True)]
        copied = replace(
            shared,
            suffix_lens=shared.suffix_lens + prefix_tokens,
            suffix_block_starts=np.cumsum([0, *map(len, tables)]).astype(np.int32),
            suffix_block_table=np.concatenate(tables),
            prefix_lens=np.zeros(1, np.int32),
            prefix_block_starts=np.zeros(2, np.int32),
            prefix_block_ids=np.zeros(0, np.int32),
        )
        caches = []
        for _ in range(2):
            cache = torch.randn(num_blocks + copies.size, BLOCK_SIZE, NUM_HEADS, HEAD_DIM).to(dtype)
            cache[torch.from_numpy(copies.astype(np.int64))] = cache[
                torch.from_numpy(shared.prefix_block_ids.astype(np.int64))
            ]
            caches.append(cache)
        query = torch.randn(num_requests, NUM_HEADS, HEAD_DIM).to(dtype)
        return cls(query=query, k_cache=caches[0], v_cache=caches[1], shared=shared, copied=copied)

    def attend(self, kernels: NativeBackend, work: NativeWork) -> torch.Tensor:
        return kernels.attend(self.query, self.k_cache, self.v_cache, work, Scoring(scale=HEAD_DIM**-0.5))


def relay(num_threads: int) -> Table:
    """Every batch size at every prefix length.

    Raises:
        WrongAnswerError: the two forms differ.
    """
    torch.manual_seed(0)
    torch.set_num_threads(num_threads)
    rows: list[list[Cell]] = []
    series: dict[str, list[tuple[float, float]]] = {}
    for num_requests in BATCH_SIZES:
        for prefix_tokens in PREFIX_TOKENS:
            shared_ms, copied_ms = _measure(num_requests, prefix_tokens)
            predicted = equation_10(num_requests, prefix_tokens, OWN_TOKENS)
            print(f"  batch {num_requests}, prefix {prefix_tokens}: {copied_ms / shared_ms:.2f}", flush=True)
            rows.append(
                [
                    num_requests, prefix_tokens, round(copied_ms, 3), round(shared_ms, 3),
                    round(copied_ms / shared_ms, 2), round(predicted, 2),
                ]
            )  # fmt: skip
            series.setdefault(f"batch {num_requests}", []).append((prefix_tokens, copied_ms / shared_ms))
            series.setdefault(f"batch {num_requests}, Eq. 10", []).append((prefix_tokens, predicted))
    return Table(
        method=(
            f"measured: the native kernel, bfloat16, {num_threads} threads, {NUM_HEADS} heads of {HEAD_DIM}, one query "
            f"head a KV head; decode, {OWN_TOKENS} own tokens, medians of {NUM_REPEATS} interleaved runs"
        ),
        columns=("batch size", "prefix tokens", "own copies, ms", "shared, ms", "speed-up", "Eq. 10"),
        rows=rows,
        plots=[
            Plot(
                slug="relay",
                title="Attention, times as fast with the prefix shared",
                kind="lines",
                labels=["tokens of the shared prefix", "times as fast; dashed: Eq. 10"],
                series={name: series[name] for name in sorted(series, key=lambda name: "Eq" in name)},
            )
        ],
    )


def _measure(num_requests: int, prefix_tokens: int) -> tuple[float, float]:
    """Milliseconds with a shared prefix and with copies, after both agree in float32 and in bfloat16."""
    for dtype, tolerance in TOLERANCES.items():
        kernels = NativeBackend(
            num_q_heads=NUM_HEADS, num_kv_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=dtype, block_size=BLOCK_SIZE,
            folder=cache_folder(),
        )  # fmt: skip
        step = Step.make(num_requests, prefix_tokens, dtype)
        works = [kernels.prepare(batch) for batch in (step.shared, step.copied)]
        shared, copied = (step.attend(kernels, work).float() for work in works)
        error = float((shared - copied).abs().max())
        if not error < tolerance:
            raise WrongAnswerError(f"{num_requests} requests, prefix of {prefix_tokens}: {dtype} differs by {error}")
    times: list[list[float]] = [[], []]
    other = torch.empty(CACHE_BYTES, dtype=torch.uint8)
    for number in range(NUM_REPEATS):
        for work, found in in_turn(zip(works, times, strict=True), number):
            other.add_(1)
            started = time.perf_counter()
            step.attend(kernels, work)
            found.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[0]), statistics.median(times[1])
