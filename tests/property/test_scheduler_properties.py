"""The scheduler without a model: whatever the prompts, limits and lengths of answers, every promise is kept."""

import random

from hypothesis import given
from hypothesis import strategies as st

from engine import Request, plan_prefix_groups
from engine.block_pool import BlockPool
from engine.prefix_node import PrefixNode
from engine.scheduled_group import schedule_groups
from engine.scheduler import Scheduler
from engine.sequence import Sequence

BLOCK_SIZE = 4


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
        Request(request_id=str(i), token_ids=prompt, max_new_tokens=rng.randrange(1, 10))
        for i, prompt in enumerate(prompts)
    ]


@given(
    workloads(),
    st.integers(1, 20),
    st.integers(0, 12),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from(["exact", "paper"]),
    st.randoms(use_true_random=False),
)
def test_a_run_ends_within_its_limits_and_leaks_nothing(
    requests: list[Request], chunk_tokens: int, spare_blocks: int, reserve: float, method: str, rng: random.Random
) -> None:
    alone = [-(-(len(r.token_ids) + r.max_new_tokens) // BLOCK_SIZE) + 1 for r in requests]
    pool = BlockPool(max(alone) + spare_blocks)
    groups = plan_prefix_groups([r.token_ids for r in requests], method=method)
    scheduled = schedule_groups(requests, groups, (), BLOCK_SIZE)
    sequences = [sequence for group in scheduled for sequence in group.sequences]
    lengths = {id(s): rng.randint(1, s.request.max_new_tokens) for s in sequences}
    scheduler = Scheduler(
        scheduled, pool=pool, block_size=BLOCK_SIZE, chunk_tokens=chunk_tokens, output_reserve=reserve
    )
    answered: list[int] = []
    while not (step := scheduler.next_step()).is_empty:
        counts = [count for _, count in (*step.decodes, *step.suffixes)] + list(step.prefixes.values())
        assert all(count > 0 for count in counts)
        assert sum(counts) <= chunk_tokens
        assert step.room == chunk_tokens - sum(counts)
        assert pool.num_used <= pool.num_blocks
        check_memory(step.decodes + step.suffixes, step.prefixes)
        batch, outputs = step.lay_out(BLOCK_SIZE)
        assert batch.attention.num_rows == sum(counts)
        assert len(set(batch.attention.slot_mapping.tolist())) == sum(counts)
        scheduler.complete_step(step)
        for sequence, _ in outputs:
            sequence.append(7)
            if sequence.num_output_tokens == lengths[id(sequence)]:
                scheduler.finish(sequence)
                answered += sequence.owners
            else:
                scheduler.continue_decoding(sequence)
    assert sorted(answered) == list(range(len(requests)))
    assert pool.num_used == 0
    assert pool.allocate(pool.num_blocks).tolist() == list(range(pool.num_blocks))


def check_memory(scheduled: list[tuple[Sequence, int]], prefixes: dict[PrefixNode, int]) -> None:
    """Whoever computes has room for it, on a whole prefix that nobody else writes to."""
    owned: list[int] = []
    nodes: set[PrefixNode] = set(prefixes)
    for sequence, count in scheduled:
        assert len(sequence.block_ids) * BLOCK_SIZE >= sequence.num_computed + count
        owned += sequence.block_ids.tolist()
        if sequence.node is not None:
            assert sequence.node.is_complete, "a suffix started before its prefix was complete"
            nodes.add(sequence.node)
    nodes |= {above for node in nodes for above in node.chain()}
    for node in nodes:
        assert len(node.block_ids) * BLOCK_SIZE >= len(node.token_ids)
        owned += node.block_ids.tolist()
    assert len(owned) == len(set(owned))


@given(workloads(), st.integers(1, 20))
def test_every_token_is_computed_once_when_memory_is_ample(requests: list[Request], chunk_tokens: int) -> None:
    groups = plan_prefix_groups([r.token_ids for r in requests])
    scheduled = schedule_groups(requests, groups, (), BLOCK_SIZE)
    nodes = {n for g in scheduled if g.node is not None for n in g.node.chain()}
    num_planned = sum(len(n.token_ids) for n in nodes) + sum(s.num_suffix for g in scheduled for s in g.sequences)
    scheduler = Scheduler(
        scheduled, pool=BlockPool(4000), block_size=BLOCK_SIZE, chunk_tokens=chunk_tokens, output_reserve=1.0
    )
    num_computed = 0
    while not (step := scheduler.next_step()).is_empty:
        num_computed += chunk_tokens - step.room
        _, outputs = step.lay_out(BLOCK_SIZE)
        scheduler.complete_step(step)
        for sequence, _ in outputs:
            sequence.append(7)
            scheduler.finish(sequence)
    assert num_computed == num_planned
    # Blocks shared along a path can only save on top of one prefix a group.
    ends = [g.node.end if g.node is not None else 0 for g in scheduled]
    assert num_planned <= sum(ends) + sum(s.num_suffix for g in scheduled for s in g.sequences)
