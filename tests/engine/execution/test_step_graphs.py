"""The room that a graph reserves for attention: decode steps of any shape fit, so that hardly one runs without."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.kernels.attention_batches import GroupSize, make_batch
from engine.execution.step_graphs import BUCKETS, DeviceGraph, find_buckets, work_capacity
from engine.kernels.triton.device_work import WorkCapacity
from engine.kernels.triton.tuned import load_tuned
from engine.kernels.triton.work_list import build_work_list

BLOCK_SIZE = 32


class OldTorch:
    """What torch 2.11 does with captures, as far as `DeviceGraph` calls it: one that the driver ends stays open."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open_pools: set[tuple[int, int]] = set()
        self.released: list[tuple[int, int]] = []
        replaced = {"CUDAGraph": object, "graph": self.graph, "empty_cache": self.empty_cache}
        replaced |= {"graph_pool_handle": lambda: (0, 7), "current_stream": object, "set_stream": lambda stream: None}
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end, raising=False)
        monkeypatch.setattr(
            torch._C, "_cuda_releasePool", lambda index, pool: self.released.append(pool), raising=False
        )

    @contextmanager
    def graph(self, graph: object, pool: tuple[int, int], **others: object) -> Iterator[None]:
        self.empty_cache()
        self.open_pools.add(pool)
        try:
            yield
        except MemoryError:  # the capture itself is valid, so torch closes it
            self.open_pools.discard(pool)
            raise
        self.open_pools.discard(pool)

    def empty_cache(self) -> None:
        if self.open_pools:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    def end(self, index: int, pool: tuple[int, int]) -> None:
        if pool not in self.open_pools:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.open_pools.discard(pool)


@pytest.mark.parametrize("error", [MemoryError("out of memory"), RuntimeError("operation not permitted")])
def test_after_a_capture_that_fails_others_succeed(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> None:
        raise error

    old = OldTorch(monkeypatch)
    stream: Any = SimpleNamespace(device_index=0)
    with pytest.raises(type(error)):
        DeviceGraph(stream, None).capture(fail)
    assert old.released == ([(0, 7)] if type(error) is RuntimeError else []), "torch releases what it has closed"
    torch.cuda.empty_cache()
    DeviceGraph(stream, DeviceGraph(stream, None)).capture(lambda: None)


def decode_step(num_rows: int, rng: random.Random) -> list[GroupSize]:
    """Groups of any size, on prefixes and own parts from a token to tens of thousands."""
    groups = []
    while num_rows:
        size = min(num_rows, rng.choice([1, 1, 3, 20, 300]))
        prefix_len = rng.choice([0, 40, 900, 30_000])
        members = [(rng.choice([1, 50, 700, rng.randrange(1, 20_000)]), 1) for _ in range(size)]
        groups.append(GroupSize(prefix_len=prefix_len, members=members))
        num_rows -= size
    return groups


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "gfx90a", "gfx942", "default"])
@pytest.mark.parametrize(("group_size", "num_kv_heads"), [(1, 8), (4, 8), (8, 1)])
def test_decode_steps_fit_into_their_bucket(architecture: str, group_size: int, num_kv_heads: int) -> None:
    tuned = load_tuned(architecture, element_bits=16, head_dim=128)
    backend = SimpleNamespace(tuned=tuned, num_kv_heads=num_kv_heads, group_size=group_size)
    rng = random.Random(3)
    for num_rows in (1, 2, 7, 64, 100, 511, 2000):
        batch, num_blocks = make_batch(decode_step(num_rows, rng), BLOCK_SIZE)
        work_list = build_work_list(batch, tuned, group_size=group_size, num_kv_heads=num_kv_heads, policy="fused")
        bucket = next(size for size in BUCKETS if size >= num_rows)
        capacity = work_capacity(backend, bucket, most_blocks=50_000 // BLOCK_SIZE + 1, num_kv_blocks=num_blocks)  # type: ignore[arg-type]
        assert capacity.holds(WorkCapacity.of(work_list)), (capacity, WorkCapacity.of(work_list))


def test_buckets_are_few_and_less_than_half_of_one_is_padding() -> None:
    assert list(BUCKETS) == sorted(set(BUCKETS))
    assert len(BUCKETS) <= 32
    for num_rows in range(1, BUCKETS[-1] + 1):
        bucket = next(size for size in BUCKETS if size >= num_rows)
        assert num_rows <= bucket < 2 * num_rows


@pytest.mark.parametrize(("max_num_batched_tokens", "last"), [(1, 1), (96, 96), (97, 112), (2048, 2048), (16384, 2048)])
def test_no_bucket_is_larger_than_a_step_needs(max_num_batched_tokens: int, last: int) -> None:
    buckets = find_buckets(max_num_batched_tokens)
    assert buckets == BUCKETS[: len(buckets)]
    assert buckets[-1] == last
