"""Full blocks that several groups begin with: small cases, and any part of any plan against a tree from scratch."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig, PrefixGroup, Request, plan_prefix_groups
from engine.config import Order
from engine.planning.group import Member
from engine.planning.planner import PlanMethod, plan_prompts
from engine.planning.prefix_tree import build_prefix_tree
from engine.scheduling.admission import make_pool
from engine.scheduling.policies.sharing import schedule_groups
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.scheduler import Scheduler

Prompt = list[int]

# Stretches of equal tokens: few symbols and uneven lengths, so that deep, uneven trees are common.
stretches = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=4)
prompts_st = stretches.map(lambda parts: [token for token, length in parts for _ in range(length)])
BATCHES = st.lists(prompts_st | st.lists(st.integers(0, 1), min_size=1, max_size=6), max_size=20)


def requests_of(prompts: list[Prompt]) -> list[Request]:
    return [Request(request_id=str(i), token_ids=prompt) for i, prompt in enumerate(prompts)]


def chains_of(prompts: list[Prompt], groups: list[PrefixGroup], block_size: int) -> list[list[PrefixNode]]:
    scheduled = schedule_groups(requests_of(prompts), groups, (), EngineConfig(block_size=block_size))
    return [group[0].node.chain() if group[0].node is not None else [] for group in scheduled]


def common_ends(groups: list[PrefixGroup], block_size: int) -> list[list[int]]:
    """Where the nodes that each group has in common with others end, read off a prefix tree of the groups' tokens."""
    # The tree keeps every sequence's last token to itself, and equal sequences as one leaf. A group's own end mark
    # behind its tokens makes both right here: all tokens can be shared, each group is a leaf.
    tree = build_prefix_tree([np.append(group.leading_tokens, np.int32(-1 - i)) for i, group in enumerate(groups)])
    ends_of_node: list[list[int]] = [[]]
    for node in range(1, tree.num_nodes):
        above, end = ends_of_node[tree.node_parents[node]], int(tree.node_depths[node]) // block_size * block_size
        ends_of_node.append([*above, end] if end > (above[-1] if above else 0) else above)
    ends: list[list[int]] = [[] for _ in groups]
    for row, node in zip(tree.rows.tolist(), tree.leaf_nodes.tolist(), strict=True):
        ends[row] = ends_of_node[node]
    return ends


@pytest.mark.parametrize("order", ["ratio", "fcfs", "sjf", "priority"])
def test_a_document_is_computed_once_however_its_groups_are_ordered(order: Order) -> None:
    """Long answers to one question of a document and labels for another; memory holds a third of all documents."""
    rng = np.random.default_rng(0)
    head, first, second = (rng.integers(3, 99, length).tolist() for length in (9, 20, 20))
    documents = [head + rng.integers(3, 99, rng.integers(80, 120)).tolist() for _ in range(30)]
    score = {"mode": "score", "labels": ((5,), (6,))}
    requests = [
        Request(request_id="", token_ids=[*document, *question, tail], priority=tail, **how)
        for question, how in ((first, {"max_new_tokens": 16}), (second, score))
        for document in documents
        for tail in (1, 2)
    ]
    config = EngineConfig(block_size=8, max_num_batched_tokens=64, order=order)
    groups = plan_prefix_groups([request.token_ids for request in requests], block_size=8)
    scheduled = schedule_groups(requests, groups, (), config)
    nodes = {node for group in scheduled if group[0].node for node in group[0].node.chain()}
    num_planned = sum(len(node.token_ids) for node in nodes) + sum(s.num_suffix for group in scheduled for s in group)
    assert len(nodes) > 80  # a head, documents, their questions
    scheduler = Scheduler(scheduled, pool=make_pool(config, 200), config=config, swap=None)
    num_computed = 0
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        num_computed += sum(step.prefixes.values()) + sum(count for _, count in step.suffixes)
        scheduler.commit(step, [7] * len(step.sampled), lambda *_: ((), None))
    assert num_computed == num_planned


def test_a_text_may_grow_from_prompt_to_prompt_a_thousand_times() -> None:
    prompts = [[3] * (2 * turn + 1) for turn in range(1, 1200)]
    requests = [Request(request_id="", token_ids=prompt, max_new_tokens=1) for prompt in prompts]
    config = EngineConfig(block_size=2, max_num_batched_tokens=4096)
    scheduled = schedule_groups(requests, plan_prefix_groups(prompts, block_size=2), (), config)
    assert max(len(group[0].node.chain()) for group in scheduled if group[0].node) > 1000
    scheduler = Scheduler(scheduled, pool=make_pool(config, 4096), config=config, swap=None)
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        scheduler.commit(step, [7] * len(step.sampled), lambda *_: ((), None))
    assert scheduler.pool.num_free == 4096


def test_groups_below_one_instruction_share_its_full_blocks() -> None:
    instruction, document, other = [*range(10)], [*range(10, 17)], [*range(20, 29)]
    prompts = [
        *(instruction + document + [100 + i, 0] for i in range(4)),
        *(instruction + other + [200 + i, 0] for i in range(3)),
        [*instruction, 300, 0],
    ]
    groups = plan_prefix_groups(prompts)
    assert sorted((len(group.prefix), len(group.members)) for group in groups) == [(0, 1), (17, 4), (19, 3)]
    chains = chains_of(prompts, groups, 4)
    assert [[(node.start, node.end) for node in chain] for chain in chains] == [
        [(0, 8), (8, 17)],
        [(0, 8), (8, 19)],
        [(0, 8)],
    ]
    assert chains[0][0] is chains[1][0] is chains[2][0]
    assert chains[0][0].token_ids.tolist() == prompts[0][:8]


def test_common_nodes_lie_below_common_nodes() -> None:
    one, two, three = ([*range(8), *range(base, base + 4)] for base in (20, 30, 40))
    prefixes = [[*one, *[1] * 20], [*one, *[2] * 20], [*two, *[3] * 20], [*three[:9], *[4] * 20], [50]]
    prompts = [[*prefix, tail] for prefix in prefixes for tail in (1, 2, 3)]
    groups = plan_prefix_groups(prompts)
    chains = chains_of(prompts, groups, 4)
    assert [[node.end for node in chain] for chain in chains] == [[8, 12, 32], [8, 12, 32], [8, 32], [8, 29], []]
    assert len({id(chain[0]) for chain in chains[:4]}) == 1
    assert chains[0][1] is chains[1][1]


def test_common_nodes_never_reach_the_last_token_of_a_prompt_planned_alone() -> None:
    """Two such prompts can begin alike where the rest of their groups is elsewhere, in another partition, say."""
    prompts = [[*range(8)], [*range(9)], [*range(9), 1], [*range(9), 2]]
    plan, _ = plan_prompts([np.array(prompt, np.int32) for prompt in prompts], method="paper")
    for rows in ([0, 1], [0, 2], [0, 1, 2, 3]):
        groups = plan.select(np.isin(plan.row_id, rows)).groups()
        for chain, group in zip(chains_of([prompts[row] for row in rows], groups, 4), groups, strict=True):
            lengths = [len(group.prefix) + len(member.suffix) for member in group.members]
            assert all(node.end < length for node in chain for length in lengths)


def test_groups_in_any_order_share_the_same_nodes() -> None:
    prompts = [[*range(10), *[document] * 20, tail] for document in (20, 30, 40) for tail in (1, 2)]
    groups = plan_prefix_groups(prompts)
    for order in ([2, 0, 1], [1, 2], [2]):
        chains = chains_of(prompts, [groups[i] for i in order], 4)
        assert len({id(chain[0]) for chain in chains}) == 1
        assert all([node.end for node in chain] == [8, 30] for chain in chains)


def test_groups_built_by_hand_share_their_prefix_alone() -> None:
    prompts = [[*range(8), 8 + i] for i in range(4)]
    groups = [
        PrefixGroup(
            prefix=np.arange(8, dtype=np.int32),
            members=tuple(Member(request_indices=(i,), suffix=np.array([8 + i], np.int32)) for i in pair),
        )
        for pair in ((0, 1), (2, 3))
    ]
    first, second = chains_of(prompts, groups, 4)
    assert [node.end for node in first] == [node.end for node in second] == [8]
    assert first[0] is not second[0]


def test_a_group_that_is_skipped_leaves_no_node() -> None:
    """Every node is freed after its last user, so each must have one."""
    prompts = [[*range(10), *[document] * 20, tail] for document in (20, 30, 40) for tail in (1, 2)]
    for skipped in ({0, 1}, {0, 1, 2, 3}, {2, 3}):
        scheduled = schedule_groups(
            requests_of(prompts), plan_prefix_groups(prompts), skipped, EngineConfig(block_size=4)
        )
        users = Counter(id(sequence.node) for group in scheduled for sequence in group)
        nodes = {id(node): node for (first, *_) in scheduled if first.node is not None for node in first.node.chain()}
        users.update(id(node.parent) for node in nodes.values() if node.parent is not None)
        assert {key: node.num_unfinished for key, node in nodes.items()} == users


@pytest.mark.parametrize("method", ["exact", "paper"])
@given(sequences=BATCHES, block_size=st.integers(1, 5), data=st.data())
def test_common_nodes_are_exactly_the_full_blocks_that_groups_share(
    method: PlanMethod, sequences: list[Prompt], block_size: int, data: st.DataObject
) -> None:
    """Of a whole plan and of any of its rows, say those that are not answered yet."""
    plan, _ = plan_prompts([np.array(prompt, dtype=np.int32) for prompt in sequences], method=method)
    chosen = data.draw(st.lists(st.booleans(), min_size=plan.num_rows, max_size=plan.num_rows))
    for is_chosen in ([True] * plan.num_rows, chosen):
        part = plan.select(np.array(is_chosen, dtype=bool))
        groups = part.groups()
        chains = chains_of([sequences[row] for row in sorted(part.row_id.tolist())], groups, block_size)
        # A block is known by all tokens up to its end.
        block_users = Counter(
            tuple(group.leading_tokens[:end].tolist())
            for group in groups
            for end in range(block_size, len(group.leading_tokens) + 1, block_size)
        )
        found: dict[int, tuple[int, ...]] = {}
        for group, chain, ends in zip(groups, chains, common_ends(groups, block_size), strict=True):
            tokens = group.leading_tokens.tolist()
            num_shared_blocks = sum(
                block_users[tuple(tokens[:end])] > 1 for end in range(block_size, len(tokens) + 1, block_size)
            )
            num_covered = ends[-1] if ends else 0
            assert num_covered == num_shared_blocks * block_size
            has_own = len(group.prefix) > num_covered and len(group.prefix) >= block_size
            assert [node.end for node in chain] == [*ends, *([len(group.prefix)] if has_own else [])]
            assert [node.start for node in chain] == [0, *(node.end for node in chain)][: len(chain)]
            assert [token for node in chain for token in node.token_ids.tolist()] == tokens[
                : chain[-1].end if chain else 0
            ]
            # The same tokens are the same node, other tokens are another.
            for node in chain[: len(ends)]:
                assert found.setdefault(id(node), tuple(tokens[: node.end])) == tuple(tokens[: node.end])
        assert len(found) == len(set(found.values()))
        num_saved = sum((users - 1) * block_size for users in block_users.values())
        assert part.num_common_block_tokens(block_size) == num_saved
