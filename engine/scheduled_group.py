"""A prefix group as the scheduler runs it: the node of its prefix's KV, and a sequence for each distinct answer."""

from collections.abc import Collection
from collections.abc import Sequence as Sequences
from dataclasses import dataclass

from engine.prefix_groups import PrefixGroup
from engine.prefix_node import PrefixNode
from engine.request import Request
from engine.sequence import Sequence, most_extra_tokens
from engine.shared_runs import plan_shared_runs


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduledGroup:
    """Distinct prompts below one prefix node; None where nothing is shared."""

    node: PrefixNode | None
    sequences: Sequences[Sequence]

    @property
    def decode_to_prefill_ratio(self) -> float:
        """Eq. 3 over the group, as Eq. 4 has it: tokens it may decode for the tokens it must prefill."""
        num_prefill = sum(s.num_suffix for s in self.sequences) + (self.node.end if self.node is not None else 0)
        return sum(most_extra_tokens(s.request) for s in self.sequences) / num_prefill

    @property
    def is_ready(self) -> bool:
        return self.node is None or self.node.is_complete


def schedule_groups(
    requests: Sequences[Request], groups: Sequences[PrefixGroup], skipped: Collection[int], block_size: int
) -> list[ScheduledGroup]:
    """Turns a plan into groups to run: requests that share prompt and way of answering become one sequence.

    The full blocks that several groups begin with become nodes of their own, computed and stored once.

    Args:
        skipped: indices of requests that are not to be run; they have been answered already.
    """
    forest = plan_shared_runs(groups, block_size)
    run_nodes: list[PrefixNode] = []
    for run in forest.runs:
        parent = run_nodes[run.parent] if run.parent >= 0 else None
        run_nodes.append(PrefixNode(parent=parent, token_ids=run.token_ids, start=run.start))
    scheduled = []
    for index, group in enumerate(groups):
        deepest = int(forest.group_runs[index])
        node = run_nodes[deepest] if deepest >= 0 else None
        num_covered = forest.num_covered_tokens(index)
        # A prefix shorter than a block is computed with each suffix: a part of attention of its own would cost more.
        if len(group.prefix) > num_covered and len(group.prefix) >= block_size:
            node = PrefixNode(parent=node, token_ids=group.prefix[num_covered:], start=num_covered)
        sequences = [
            Sequence(request=requests[owners[0]], owners=owners, node=node)
            for member in group.members
            for owners in _owners_by_answer(requests, member.request_indices, skipped)
        ]
        if sequences:
            scheduled.append(ScheduledGroup(node=node, sequences=sequences))
        elif node is not None:
            node.forget()
    return scheduled


def _owners_by_answer(
    requests: Sequences[Request], indices: Sequences[int], skipped: Collection[int]
) -> list[tuple[int, ...]]:
    owners: dict[object, list[int]] = {}
    for index in indices:
        if index not in skipped:
            owners.setdefault(requests[index].answer_key, []).append(index)
    return [tuple(same) for same in owners.values()]
