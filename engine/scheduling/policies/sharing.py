"""Which requests share KV: groups of a plan as the scheduler runs them, or each request on its own."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Sequences
from operator import attrgetter

from engine.config import EngineConfig
from engine.errors import RequestError
from engine.planning.group import CommonPrefix, PrefixGroup
from engine.planning.prefix_tree import TokenArray
from engine.request import Request
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.sequence import ScheduledGroup, Sequence

_Nodes = dict[CommonPrefix, PrefixNode | None]


def schedule_groups(
    requests: Sequences[Request],
    groups: Sequences[PrefixGroup],
    skipped: Collection[int],
    config: EngineConfig,
    make_node: Callable[..., PrefixNode] = PrefixNode,
) -> list[ScheduledGroup]:
    """Turns a plan into the groups of a run.

    "path"
        explicit: a group's prefix is computed once, and so are the full blocks that several groups begin with, as nodes
        above it. Requests with the same prompt and `Request.answer_key` become one sequence.
    "group"
        explicit, single level: as "path", without the beginnings that several groups share (BatchLLM section 4.2).
    "lru", "none"
        the plan is not used: each request is a group of its own, in the order of the requests, as if they arrived in a
        stream. Under "lru" shared blocks are found in an `LruPool`.

    Args:
        groups: their members' request_indices point into `requests`.
        skipped: indices of requests that are answered already and not run.
        config: its `sharing`; with `deterministic`, a prefix has full blocks only, and each suffix has the rest.
    """
    block_size, sharing = config.block_size, config.sharing
    if sharing in ("lru", "none"):
        return [
            [Sequence(request=request, owners=(index,), node=None)]
            for index, request in enumerate(requests)
            if index not in skipped
        ]
    nodes: _Nodes = {}
    scheduled = []
    for group in groups:
        answers = [
            owners for member in group.members for owners in owners_by_answer(requests, member.request_indices, skipped)
        ]
        if not answers:
            continue
        base = _common_node(group, block_size, nodes, make_node) if sharing == "path" else None
        node, num_covered = base, base.end if base is not None else 0
        # A prefix shorter than a block is computed with each suffix: separate attention over it would cost more.
        end = len(group.prefix) // block_size * block_size if config.deterministic else len(group.prefix)
        if end > num_covered and end >= block_size:
            node = make_node(parent=base, token_ids=group.prefix[num_covered:end], start=num_covered)
        # Of its owners, the request of the highest priority is computed.
        urgent = [max((requests[owner] for owner in owners), key=attrgetter("priority")) for owners in answers]
        scheduled.append([Sequence(request=r, owners=o, node=node) for r, o in zip(urgent, answers, strict=True)])
    return scheduled


def _common_node(
    group: PrefixGroup, block_size: int, nodes: _Nodes, make_node: Callable[..., PrefixNode]
) -> PrefixNode | None:
    """The deepest node of full blocks that the group shares with others; nodes that do not exist yet are made."""
    new: list[CommonPrefix] = []
    common = group.common
    while common is not None and common not in nodes:
        new.append(common)
        common = common.parent
    node = nodes[common] if common is not None else None
    for common in reversed(new):
        start, end = node.end if node is not None else 0, common.num_tokens // block_size * block_size
        if end > start:
            node = make_node(parent=node, token_ids=group.leading_tokens[start:end], start=start)
        nodes[common] = node
    return node


def check_groups(requests: Sequences[Request], groups: Sequences[PrefixGroup]) -> None:
    """Raises `RequestError` unless each request is in one group, with its own prompt and a suffix that is not empty."""
    for name, given in (("requests", requests), ("groups", groups)):
        if not isinstance(given, Sequences):
            raise RequestError(f"{name} must be a sequence, got {given!r}")
    left, known = dict(enumerate(requests)), dict[CommonPrefix, TokenArray]()
    for number, group in enumerate(groups):
        if not isinstance(group, PrefixGroup):
            raise RequestError(f"groups must hold PrefixGroups, got {group!r}")
        if not all(getattr(part, "dtype", 0) == "int32" for part in (group.prefix, *(m.suffix for m in group.members))):
            raise RequestError("groups must hold tokens in int32 arrays, in their prefixes and suffixes")
        for member in group.members:
            for index in member.request_indices:
                if index not in left:
                    raise RequestError(f"request {index} of {len(requests)} is in two groups, or does not exist")
                if not isinstance(request := left.pop(index), Request):
                    raise RequestError(f"requests must hold Requests, got {request!r}")
                if not (own := member.suffix.tobytes()) or request.token_ids.tobytes() != group.prefix.tobytes() + own:
                    why = "its group has another prompt, or no token after its prefix"
                    raise RequestError(f"request {request.request_id!r}: {why}")
        if group.common is not None and not group.has_common(known):
            raise RequestError(f"groups[{number}].common is too long, or has other tokens in another group")
    if left:
        raise RequestError(f"request {requests[min(left)].request_id!r} is in no group")


def owners_by_answer(
    requests: Sequences[Request], indices: Sequences[int], skipped: Collection[int] = ()
) -> list[tuple[int, ...]]:
    """`indices` of requests with one prompt, grouped by `Request.answer_key`. See `schedule_groups`."""
    owners: dict[object, list[int]] = {}
    for index in indices:
        if index not in skipped:
            owners.setdefault(requests[index].answer_key, []).append(index)
    return [tuple(same) for same in owners.values()]
