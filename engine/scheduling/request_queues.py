"""Who waits and who runs: groups not started, prefixes being computed, requests with and without KV memory."""

import math
from collections import deque
from collections.abc import Iterable

from engine.config import EngineConfig, Order
from engine.kv.block_pool import BlockPool
from engine.scheduling.admission import Admission
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.sequence import ScheduledGroup, Sequence
from engine.scheduling.step import Step


def order_groups(groups: Iterable[ScheduledGroup], order: Order) -> list[ScheduledGroup]:
    """Arranges groups in the order in which they start; what ties keeps its place.

    "ratio": the larger expected decode length for its prefill first (BatchLLM Eq. 4), so that long answers start early
    and their decode tokens find prefill to share a step with. The others: see `order_by_request`.
    """
    if order == "ratio":
        return sorted(groups, key=lambda group: -group.decode_to_prefill_ratio)
    from engine.scheduling.policies.order import order_by_request  # few runs have another order

    return order_by_request(groups, order)


class RequestQueues:
    """The queues of one run, and how requests and prefixes move on from them as memory and the cap allow.

    A group waits until its prefix is given memory; its requests then wait for the prefix; once that is computed they
    are ready, those that lost their memory first; with memory of their own they prefill, then decode.

    Args:
        groups: what is to be answered, in any order.
        pool: KV blocks.
        config: the policies, and the limits of a step.
        admission: which requests may be given memory.
    Attributes:
        mixes_phases: whether a step may hold both prompts and decode tokens.
        waiting_groups: not started, in the order in which they are to start.
        prefixes: those that have memory and are being computed, with the requests that wait for them.
        ready: requests whose prefix is computed, in the order in which they are to be given memory.
        prefilling, decoding: requests that hold KV.
        num_unfinished: requests not answered yet, running or not.
    """

    mixes_phases = True

    def __init__(
        self, groups: Iterable[ScheduledGroup], *, pool: BlockPool, config: EngineConfig, admission: Admission
    ) -> None:
        self._pool = pool
        self._config = config
        self._admission = admission
        self._max_running = math.inf if config.max_running_requests == "memory" else config.max_running_requests
        self.waiting_groups = deque(order_groups(groups, config.order))
        self.prefixes: dict[PrefixNode, list[Sequence]] = {}
        self.ready: deque[Sequence] = deque()
        self.prefilling: dict[Sequence, None] = {}
        self.decoding: dict[Sequence, None] = {}
        self.num_unfinished = sum(len(group.sequences) for group in self.waiting_groups)

    @property
    def num_running(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def has_free_place(self) -> bool:
        """Whether the cap allows one request more."""
        return self.num_running < self._max_running

    def add_prompts(self, step: Step) -> None:
        """Adds prompts to a step: continues those begun, then starts requests and prefixes while it has room."""
        for sequence in self.prefilling:
            step.add(step.suffixes, sequence)
        # An incomplete prefix fills the step, so no other prefix takes the memory that its requests wait for.
        while self._add_ready(step) and step.room and self.waiting_groups and self.has_free_place:
            if not self._admission.fits_group(self.waiting_groups[0]):
                return
            group = self.waiting_groups.popleft()
            self._start_prefix(group.node, group.sequences)

    def release_computed_prefixes(self) -> None:
        """Makes the requests of prefixes that are complete now ready."""
        for node in [node for node in self.prefixes if node.is_complete]:
            self.ready.extend(self.prefixes.pop(node))

    def start_decoding(self, sequence: Sequence) -> None:
        """Of a sequence whose prompt is computed; one that decodes goes on."""
        self.prefilling.pop(sequence, None)
        self.decoding[sequence] = None

    def stop(self, sequence: Sequence) -> None:
        """Takes out a sequence that holds no KV any more: it is answered, or has lost its memory."""
        self.prefilling.pop(sequence, None)
        self.decoding.pop(sequence, None)

    def _admit_ready(self, step: Step) -> bool:
        """Starts ready requests while the step has room; False where memory or the cap forbids the next one."""
        while step.room and self.ready:
            sequence = self.ready[0]
            if not self._can_admit(sequence):
                return False
            self._admit(self.ready.popleft())
            step.add(step.decodes if sequence in self.decoding else step.suffixes, sequence)
        return True

    def _add_ready(self, step: Step) -> bool:
        """Starts requests whose prefix is complete, and continues the prefixes of others; returns as `_admit_ready`."""
        if not self._admit_ready(step):
            return False
        for node in list(self.prefixes):
            node.add_to(step)
            if node.is_complete_after(step):  # in each layer, a step's KV is written before anything attends
                self.ready.extend(self.prefixes.pop(node))
                if not self._admit_ready(step):
                    return False
        return True

    def _can_admit(self, sequence: Sequence) -> bool:
        return self.has_free_place and self._admission.fits(sequence)

    def _admit(self, sequence: Sequence) -> None:
        self._admission.admit(sequence)
        is_prefilled = sequence.num_computed >= sequence.num_suffix  # swapped in
        (self.decoding if is_prefilled else self.prefilling)[sequence] = None

    def _start_prefix(self, node: PrefixNode | None, waiting: Iterable[Sequence]) -> int:
        """Gives a prefix memory, and queues its requests; returns the tokens that it took blocks for."""
        num_tokens = 0 if node is None else node.acquire(self._pool, self._config.block_size)
        if node is None or node.is_complete:
            self.ready.extend(waiting)
        else:
            self.prefixes.setdefault(node, []).extend(waiting)
        return num_tokens
