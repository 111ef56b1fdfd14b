"""Waiting and running requests: groups not started, prefixes being computed, requests with and without KV memory."""

import math
from collections import deque
from collections.abc import Iterable
from operator import itemgetter

from engine.config import EngineConfig, Order
from engine.scheduling.admission import Admission
from engine.scheduling.policies.order import order_by_request
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.sequence import ScheduledGroup, Sequence, expected_extra_tokens
from engine.scheduling.step import Step


def order_groups(groups: Iterable[ScheduledGroup], order: Order) -> list[ScheduledGroup]:
    """Sorts groups into the order in which they start; equal groups keep their order.

    "ratio": the largest ratio of expected decode tokens to prefill tokens first (BatchLLM Eq. 4), so that long answers
    start early and their decode tokens share steps with prefill. The others: see `order_by_request`.

    The groups below a prefix node follow the first of them, so that few nodes are in memory at a time and none is
    evicted and computed again.
    """
    if order == "ratio":
        arranged = sorted(groups, key=lambda group: -_decode_to_prefill_ratio(group))
    else:
        arranged = order_by_request(groups, order)
    first: dict[PrefixNode, int] = {}
    places = []
    for place, group in enumerate(arranged):
        places.append([*(first.setdefault(node, place) for node in group[0].prefix_nodes()), place])
    return [group for _, group in sorted(zip(places, arranged, strict=True), key=itemgetter(0))]


def _decode_to_prefill_ratio(group: ScheduledGroup) -> float:
    """Expected decode tokens of the group for each token of its prefill (BatchLLM Eq. 3, summed as in Eq. 4)."""
    num_prefill = sum(sequence.num_suffix for sequence in group) + group[0].prefix_length
    return sum(expected_extra_tokens(sequence.request) for sequence in group) / num_prefill


class RequestQueues:
    """The queues of one run's `groups`. Requests move from one to the next as KV memory and the cap on requests allow.

    A group waits until its prefix gets memory. Its requests then wait until the prefix is computed. From then on they
    are ready, preempted ones first. With memory of their own they prefill, then decode.

    Attributes:
        mixes_phases: whether a step may hold both prompts and decode tokens.
        waiting_groups: groups not started, in the order in which they start.
        prefixes: prefixes that have memory and are being computed, each with the requests that wait for it.
        ready: requests whose prefix is computed, in the order in which they get memory.
        prefilling, decoding: requests that hold KV.
    """

    mixes_phases = True

    def __init__(self, groups: Iterable[ScheduledGroup], *, config: EngineConfig, admission: Admission) -> None:
        self._config = config
        self._admission = admission
        self._max_running = math.inf if config.max_running_requests == "memory" else config.max_running_requests
        self.waiting_groups = deque(order_groups(groups, config.order))
        self.prefixes: dict[PrefixNode, list[Sequence]] = {}
        self.ready: deque[Sequence] = deque()
        self.prefilling: dict[Sequence, None] = {}
        self.decoding: dict[Sequence, None] = {}
        for node in dict.fromkeys(node for group in self.waiting_groups for node in group[0].prefix_nodes()):
            node.announce()

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def has_free_place(self) -> bool:
        """Whether `max_running_requests` allows one request more."""
        return self.num_running < self._max_running

    def add_prompts(self, step: Step) -> None:
        """Adds prompts to a step: goes on with those begun, then starts requests and prefixes while there is room."""
        for sequence in self.prefilling:
            step.add(step.suffixes, sequence)
        # A prefix that is not complete fills the step, so no later prefix takes the memory that its requests need.
        while self._add_ready(step) and step.room and self.waiting_groups and self.has_free_place:
            if not self._admission.fits_group(self.waiting_groups[0]):
                return
            group = self.waiting_groups.popleft()
            self._start_prefix(group[0].node, group)

    def release_computed_prefixes(self) -> None:
        """Moves the requests of prefixes that are complete now to `ready`."""
        for node in [node for node in self.prefixes if node.is_complete]:
            self.ready.extend(self.prefixes.pop(node))

    def start_decoding(self, sequence: Sequence) -> None:
        """Moves a sequence whose prompt is computed to `decoding`."""
        self.prefilling.pop(sequence, None)
        self.decoding[sequence] = None

    def stop(self, sequence: Sequence) -> None:
        """Removes a sequence that is answered, or is to lose its KV."""
        self.prefilling.pop(sequence, None)
        self.decoding.pop(sequence, None)

    def requeue(self, sequence: Sequence) -> None:
        """Puts a sequence that has lost its KV before all others that wait for some."""
        self.stop(sequence)
        self.ready.appendleft(sequence)

    def forget_released_prefixes(self) -> None:
        """Removes prefixes whose last request was killed."""
        self.prefixes = {node: waiting for node, waiting in self.prefixes.items() if node.holds_blocks}

    def restart(self, groups: Iterable[ScheduledGroup]) -> None:
        """Lets all requests without KV wait in these groups again."""
        self.ready, self.prefixes, self.waiting_groups = deque(), {}, deque(groups)

    def _admit_ready(self, step: Step) -> bool:
        """Starts ready requests while the step has room; False where the next one lacks memory or exceeds the cap."""
        while step.room and self.ready:
            sequence = self.ready[0]
            if not self._can_admit(sequence):
                return False
            self._admit(self.ready.popleft())
            step.add(step.decodes if sequence in self.decoding else step.suffixes, sequence)
        return True

    def _add_ready(self, step: Step) -> bool:
        """Starts ready requests, and goes on with the prefixes that others wait for; returns as `_admit_ready`."""
        if not self._admit_ready(step):
            return False
        for node in list(self.prefixes):
            node.add_to(step)
            if node.is_complete_after(step):  # each layer writes the step's KV before any row attends
                self.ready.extend(self.prefixes.pop(node))
                if not self._admit_ready(step):
                    return False
        return True

    def _can_admit(self, sequence: Sequence) -> bool:
        return self.has_free_place and self._admission.fits(sequence)

    def _admit(self, sequence: Sequence) -> None:
        self._admission.admit(sequence)
        is_prefilled = sequence.num_computed >= sequence.num_suffix  # where its KV was swapped in
        (self.decoding if is_prefilled else self.prefilling)[sequence] = None

    def _start_prefix(self, node: PrefixNode | None, waiting: Iterable[Sequence]) -> int:
        """Allocates a prefix's blocks, and queues its requests; returns the tokens that the new blocks are for."""
        num_tokens = 0 if node is None else node.acquire(self._admission.pool)
        if node is None or node.is_complete:
            self.ready.extend(waiting)
        else:
            self.prefixes.setdefault(node, []).extend(waiting)
        return num_tokens
