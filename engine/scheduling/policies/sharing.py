"""Which requests share KV: groups of a plan as the scheduler runs them, or each request on its own."""

from collections.abc import Collection
from collections.abc import Sequence as Sequences

from engine.config import Sharing
from engine.planning.prefix_groups import PrefixGroup
from engine.planning.shared_runs import plan_shared_runs
from engine.request import Request
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.scheduled_group import ScheduledGroup
from engine.scheduling.sequence import Sequence


def schedule_groups(
    requests: Sequences[Request],
    groups: Sequences[PrefixGroup],
    skipped: Collection[int],
    block_size: int,
    sharing: Sharing = "path",
) -> list[ScheduledGroup]:
    """Turns a plan into groups to run.

    "path"
        explicit: a group's prefix is computed once, and so are the full blocks that several groups begin with, as nodes
        above it. Requests that share prompt and way of answering become one sequence.
    "group"
        explicit, single level: as "path", without what several groups have in common (BatchLLM section 4.2).
    "lru", "none"
        the plan is not used: each request is a group of its own, in the order of the requests, as a stream would bring
        them. Under "lru" the scheduler finds shared blocks in a `BlockCache`.

    Args:
        groups: their members' request_indices point into `requests`.
        skipped: indices of requests that are not to be run; they have been answered already.
    """
    if sharing in ("lru", "none"):
        indices = sorted(index for group in groups for member in group.members for index in member.request_indices)
        return [
            ScheduledGroup(node=None, sequences=[Sequence(request=requests[index], owners=(index,), node=None)])
            for index in indices
            if index not in skipped
        ]
    bases = _shared_run_nodes(groups, block_size) if sharing == "path" else [None] * len(groups)
    scheduled = []
    for group, base in zip(groups, bases, strict=True):
        node, num_covered = base, base.end if base is not None else 0
        # A prefix shorter than a block is computed with each suffix: a part of attention of its own would cost more.
        if len(group.prefix) > num_covered and len(group.prefix) >= block_size:
            node = PrefixNode(parent=base, token_ids=group.prefix[num_covered:], start=num_covered)
        sequences = [
            Sequence(request=_most_urgent(requests, owners), owners=owners, node=node)
            for member in group.members
            for owners in _owners_by_answer(requests, member.request_indices, skipped)
        ]
        if sequences:
            scheduled.append(ScheduledGroup(node=node, sequences=sequences))
        elif node is not None:
            node.forget()
    return scheduled


def _shared_run_nodes(groups: Sequences[PrefixGroup], block_size: int) -> list[PrefixNode | None]:
    """The deepest node that each group begins with, of those for full blocks that several groups begin with."""
    forest = plan_shared_runs(groups, block_size)
    nodes: list[PrefixNode] = []
    for run in forest.runs:
        parent = nodes[run.parent] if run.parent >= 0 else None
        nodes.append(PrefixNode(parent=parent, token_ids=run.token_ids, start=run.start))
    return [nodes[run] if run >= 0 else None for run in forest.group_runs.tolist()]


def _owners_by_answer(
    requests: Sequences[Request], indices: Sequences[int], skipped: Collection[int]
) -> list[tuple[int, ...]]:
    owners: dict[object, list[int]] = {}
    for index in indices:
        if index not in skipped:
            owners.setdefault(requests[index].answer_key, []).append(index)
    return [tuple(same) for same in owners.values()]


def _most_urgent(requests: Sequences[Request], owners: tuple[int, ...]) -> Request:
    """The request that stands for all that have its answer."""
    return max((requests[owner] for owner in owners), key=lambda request: request.priority)
