"""Orders in which groups start, and requests within a group, besides "ratio"."""

from collections.abc import Callable, Iterable

from engine.config import Order
from engine.scheduling.sequence import ScheduledGroup, Sequence, expected_extra_tokens


def order_by_request(groups: Iterable[ScheduledGroup], order: Order) -> list[ScheduledGroup]:
    """Sorts groups, and the requests within each group; equal ones keep their order. See `order_groups`, too.

    "fcfs"
        first come, first served: by the position of a group's first request among the requests given.
    "sjf"
        shortest job first: by expected answer length, a group by the mean of its requests.
    "priority"
        larger `Request.priority` first, a group by its largest; then first come, first served.
    """
    by = _REQUEST_KEYS[order]
    arranged = [sorted(group, key=by) for group in groups]
    return sorted(arranged, key=_mean_length if order == "sjf" else lambda group: by(group[0]))


def _mean_length(group: ScheduledGroup) -> tuple[float, int]:
    lengths = [expected_extra_tokens(sequence.request) for sequence in group]
    return sum(lengths) / len(lengths), min(sequence.owners[0] for sequence in group)


_REQUEST_KEYS: dict[Order, Callable[[Sequence], tuple[int, ...]]] = {
    "fcfs": lambda sequence: (sequence.owners[0],),
    "sjf": lambda sequence: (expected_extra_tokens(sequence.request), sequence.owners[0]),
    "priority": lambda sequence: (-sequence.request.priority, sequence.owners[0]),
}
