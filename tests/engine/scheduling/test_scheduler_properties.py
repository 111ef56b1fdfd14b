"""The scheduler without a model: under all policies, prompts, limits and lengths of answers, promises are kept."""

import random
from collections import defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig, Request, plan_prefix_groups
from engine.execution.step_record import StepMetrics
from engine.kv.block_pool import BlockPool
from engine.scheduling.admission import make_pool
from engine.scheduling.policies.packing import PADDED_PACKINGS
from engine.scheduling.policies.preemption import SwapSpace
from engine.scheduling.policies.sharing import schedule_groups
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.scheduler import Follow, Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step
from tests.engine.engine_configs import BLOCK_SIZE, engine_configs


class CountedStore:
    """KV memory that holds nothing but remembers how many blocks a copy has."""

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> int:
        return len(block_ids)

    def write_blocks(self, block_ids: npt.NDArray[np.int32], kv: int) -> None:
        assert len(block_ids) == kv


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Prompts below a few documents below an instruction, with lengths that straddle blocks; some twice."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    instruction = [1] * draw(st.integers(0, 9))
    documents = [[rng.randrange(2, 5) for _ in range(rng.randrange(12))] for _ in range(draw(st.integers(1, 4)))]
    prompts = [
        instruction + rng.choice(documents) + [rng.randrange(2, 9) for _ in range(rng.randrange(1, 8))]
        for _ in range(draw(st.integers(1, 14)))
    ]
    prompts += rng.choices(prompts, k=2)
    return [
        Request(
            request_id=str(i),
            token_ids=prompt,
            max_new_tokens=rng.randrange(1, 25),
            priority=rng.randrange(3),
            expected_output_tokens=rng.choice([None, 1, 4, 20]),
        )
        for i, prompt in enumerate(prompts)
    ]


@given(
    workloads(),
    engine_configs(),
    st.integers(0, 9),
    st.integers(0, 8),
    st.sampled_from(["exact", "paper"]),
    st.randoms(use_true_random=False),
)
def test_a_run_ends_within_its_limits_and_leaks_nothing(
    requests: list[Request],
    config: EngineConfig,
    num_spare_blocks: int,
    num_swap_blocks: int,
    method: Any,
    rng: random.Random,
) -> None:
    alone = [-(-(len(r.token_ids) + r.max_new_tokens) // BLOCK_SIZE) + 1 for r in requests]
    pool = make_pool(config, max(alone) + num_spare_blocks)
    swap = SwapSpace(CountedStore(), num_swap_blocks if config.preemption == "swap" else 0)
    groups = plan_prefix_groups([r.token_ids for r in requests], method=method)
    scheduled = schedule_groups(requests, groups, (), config)
    sequences = [sequence for group in scheduled for sequence in group]
    lengths = {s: rng.randint(1, s.request.max_new_tokens) for s in sequences}
    scheduler = Scheduler(scheduled, pool=pool, config=config, swap=swap)
    batches = BatchWatch(config)
    answered: list[int] = []
    killed: list[int] = []
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        check_limits(step, config)
        check_memory(step, pool)
        batches.check(step)
        assert swap.num_used <= swap.num_blocks
        assert step.num_prefix_blocks <= step.num_used_blocks == pool.num_used <= pool.num_blocks
        batch = step.build_batch()
        counts = [count for _, count in (*step.decodes, *step.suffixes)] + list(step.prefixes.values())
        assert batch.attention.num_rows == sum(counts) + step.num_padding_tokens
        for found in scheduler.commit(step, [7] * len(step.sampled), end_at(lengths)):
            if found.finish_reason == "error":
                killed += found.owners
                continue
            assert found.num_output_tokens == lengths[found]
            batches.leave(found)
            answered += found.owners
        assert config.preemption == "kill" or not step.killed
    assert sorted(answered + killed) == list(range(len(requests)))
    assert pool.num_used == pool.num_prefix_blocks == swap.num_used == 0
    assert sorted(pool.allocate(pool.num_blocks).tolist()) == list(range(pool.num_blocks))


@given(workloads(), engine_configs(), st.integers(0, 9), st.integers(0, 8), st.randoms(use_true_random=False))
def test_each_token_costs_its_share_of_its_step(
    requests: list[Request], config: EngineConfig, num_spare_blocks: int, num_swap_blocks: int, rng: random.Random
) -> None:
    """Of a prefix, to the first sequence below it that computes tokens then, or else later; to the last bit."""
    most = max(-(-(len(r.token_ids) + r.max_new_tokens) // BLOCK_SIZE) + 1 for r in requests)
    pool = make_pool(config, most + num_spare_blocks)
    swap = SwapSpace(CountedStore(), num_swap_blocks if config.preemption == "swap" else 0)
    groups = plan_prefix_groups([r.token_ids for r in requests])
    scheduler = Scheduler(schedule_groups(requests, groups, (), config), pool=pool, config=config, swap=swap)
    metrics = StepMetrics(scheduler)
    cost: defaultdict[Sequence, float] = defaultdict(float)
    unpaid: defaultdict[PrefixNode, float] = defaultdict(float)
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        duration_ms, work = rng.random(), [*step.decodes, *step.suffixes]
        share = duration_ms / (sum(count for _, count in work) + sum(step.prefixes.values()))
        for node, count in step.prefixes.items():
            unpaid[node] += count * share
        for sequence, count in work:
            cost[sequence] += count * share
            cost[sequence] += sum(unpaid.pop(node, 0.0) for node in sequence.prefix_nodes())
        scheduler.commit(step, [7] * len(step.sampled), lambda sequence, place, token: ((), None))
        metrics.share_time(step, duration_ms)
        assert {sequence: sequence.compute_ms for sequence in cost} == cost


def end_at(lengths: dict[Sequence, int]) -> Follow:
    """Ends answers at their lengths."""
    return lambda sequence, place, token: ((), "eos" if place + 1 - sequence.num_suffix == lengths[sequence] else None)


class BatchWatch:
    """Who runs, as the steps show it."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._running: set[Sequence] = set()
        self._may_join = True

    def check(self, step: Step) -> None:
        """The cap is respected, and nobody joins a batch that has begun to decode."""
        work = {sequence for sequence, _ in (*step.decodes, *step.suffixes)}
        self._running = {sequence for sequence in self._running if len(sequence.block_ids)}  # else preempted
        self._may_join |= not self._running
        joined = work - self._running
        self._running |= work
        if self._config.max_running_requests != "memory":
            assert len(self._running) <= self._config.max_running_requests
        if self._config.batching != "continuous":
            assert not (step.decodes and (step.suffixes or step.prefixes))
            assert self._may_join or not joined
            self._may_join = not step.decodes

    def leave(self, sequence: Sequence) -> None:
        self._running.discard(sequence)
        self._may_join |= not self._running


def check_limits(step: Step, config: EngineConfig) -> None:
    pieces = [(s.length - s.num_computed, count) for s, count in step.suffixes]
    pieces += [(len(node.token_ids) - node.num_computed, count) for node, count in step.prefixes.items()]
    counts = [count for _, count in (*pieces, *step.decodes)]
    num_rows = sum(counts) + step.num_padding_tokens
    assert min(counts) > 0
    assert num_rows <= config.max_num_batched_tokens or (config.prefill == "whole" and len(pieces) == len(counts) == 1)
    assert step.room == max(0, config.max_num_batched_tokens - sum(counts))
    if config.prefill == "whole":
        assert all(num_left == count for num_left, count in pieces), "a prompt was cut"
        assert not (pieces and step.decodes)
    if config.packing in PADDED_PACKINGS and pieces:
        assert num_rows == len(pieces) * max(counts)
    else:
        assert step.num_padding_tokens == 0


def check_memory(step: Step, pool: BlockPool) -> None:
    """Whoever computes has room for it, on a whole prefix that nobody else writes to."""
    written: list[int] = []
    nodes: set[PrefixNode] = set(step.prefixes)
    for sequence, count in (*step.decodes, *step.suffixes):
        assert len(sequence.block_ids) * BLOCK_SIZE >= sequence.num_computed + count
        written += sequence.block_ids[sequence.num_computed // BLOCK_SIZE :].tolist()
        if sequence.node is not None:
            assert sequence.node.is_complete_after(step), "a suffix started before the step that completes its prefix"
            nodes.add(sequence.node)
    nodes |= {above for node in nodes for above in node.chain()}
    for node in nodes:
        assert len(node.block_ids) * BLOCK_SIZE >= len(node.token_ids)
        written += node.block_ids.tolist()
    read = {block for s, _ in (*step.decodes, *step.suffixes) for block in s.block_ids[: s.num_computed // BLOCK_SIZE]}
    assert len(written) == len(set(written))
    assert not read & set(written)
    assert pool.num_blocks not in read | set(written), "the pad block holds something"


@given(workloads(), engine_configs())
def test_every_token_is_computed_once_when_memory_is_ample(requests: list[Request], config: EngineConfig) -> None:
    groups = plan_prefix_groups([r.token_ids for r in requests])
    scheduled = schedule_groups(requests, groups, (), config)
    sequences = [sequence for group in scheduled for sequence in group]
    nodes = {n for g in scheduled if g[0].node is not None for n in g[0].node.chain()}
    num_planned = sum(len(n.token_ids) for n in nodes) + sum(s.num_suffix for s in sequences)
    scheduler = Scheduler(scheduled, pool=make_pool(config, 4000), config=config, swap=SwapSpace(CountedStore(), 0))
    num_computed = 0
    lengths = dict.fromkeys(sequences, 1)
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        num_computed += sum(count for _, count in (*step.decodes, *step.suffixes)) + sum(step.prefixes.values())
        scheduler.commit(step, [7] * len(step.sampled), end_at(lengths))
    num_cached = sum(s.num_cached_tokens for s in sequences)
    assert num_computed == sum(len(s.request.token_ids) for s in sequences) - num_cached
    if config.sharing == "none":
        assert num_cached == 0
    if config.sharing != "lru":
        assert num_computed == num_planned
    # Blocks shared along a path can only save on top of one prefix a group.
    ends = [group[0].prefix_length for group in scheduled]
    assert num_planned <= sum(ends) + sum(s.num_suffix for s in sequences)
