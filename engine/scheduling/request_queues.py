"""Who waits and who runs: groups not started, prefixes being computed, requests with and without KV memory."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from operator import attrgetter

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
        num_unfinished: requests not answered yet, running or not.
        mixes_phases: whether a step may hold both prompts and decode tokens.
    """

    mixes_phases = True

    def __init__(
        self, groups: Iterable[ScheduledGroup], *, pool: BlockPool, config: EngineConfig, admission: Admission
    ) -> None:
        self._pool = pool
        self._config = config
        self._admission = admission
        self._max_running = math.inf if config.max_running_requests == "memory" else config.max_running_requests
        self._waiting_groups = deque(order_groups(groups, config.order))
        self._prefixes: dict[PrefixNode, list[Sequence]] = {}
        self._ready: deque[Sequence] = deque()
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        self.num_unfinished = sum(len(group.sequences) for group in self._waiting_groups)

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def has_free_place(self) -> bool:
        """Whether the cap allows one request more."""
        return self.num_running < self._max_running

    def add_prompts(self, step: Step) -> None:
        """Adds prompts to a step: continues those begun, then starts requests and prefixes while it has room."""
        for sequence in self._prefilling:
            step.add_suffix(sequence)
        # An incomplete prefix fills the step, so no other prefix takes the memory that its requests wait for.
        while self._add_ready(step) and step.room and self._waiting_groups and self.has_free_place:
            if not self._admission.fits_group(self._waiting_groups[0]):
                return
            group = self._waiting_groups.popleft()
            self._start_prefix(group.node, group.sequences)

    def release_computed_prefixes(self) -> None:
        """Makes the requests of prefixes that are complete now ready."""
        for node in [node for node in self._prefixes if node.is_complete]:
            self._ready.extend(self._prefixes.pop(node))

    def drop_freed_prefixes(self) -> None:
        """Forgets prefixes whose blocks were freed with the last request that needed them."""
        for node in [node for node in self._prefixes if not node.holds_blocks]:
            del self._prefixes[node]

    def continue_decoding(self, sequence: Sequence) -> None:
        if sequence not in self._decoding:
            self._prefilling.pop(sequence, None)
            self._decoding[sequence] = None

    def decoding_by_age(self) -> list[Sequence]:
        """Those that decode, in the order in which they were admitted."""
        return sorted(self._decoding, key=attrgetter("admission"))

    def is_decoding(self, sequence: Sequence) -> bool:
        return sequence in self._decoding

    def latest_running(self) -> Sequence:
        """The sequence that was admitted last, of those that hold KV."""
        return max((*self._decoding, *self._prefilling), key=lambda sequence: sequence.admission)

    def requeue(self, sequence: Sequence) -> None:
        """Puts a sequence that has lost its memory first in the queue."""
        self._stop(sequence)
        self._ready.appendleft(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Takes out a sequence that is answered."""
        self._stop(sequence)
        self.num_unfinished -= 1

    def evict_idle_prefixes(self) -> None:
        """Frees every prefix that the next request does not need. Called when nothing runs, so none is in use."""
        queued: defaultdict[PrefixNode | None, list[Sequence]] = defaultdict(list)
        for sequence in self._ready:
            queued[sequence.node].append(sequence)
        ready = [ScheduledGroup(node=node, sequences=sequences) for node, sequences in queued.items()]
        ready += [ScheduledGroup(node=node, sequences=waiting) for node, waiting in self._prefixes.items()]
        groups = [*ready, *self._waiting_groups]
        kept = set(groups[0].node.chain()) if groups[0].node is not None else set()
        nodes = {node for group in groups if group.node is not None for node in group.node.chain()}
        for node in sorted(nodes - kept, key=lambda node: -node.start):
            node.release(self._pool)
        self._ready.clear()
        self._prefixes.clear()
        self._waiting_groups = deque(groups)

    def _stop(self, sequence: Sequence) -> None:
        self._prefilling.pop(sequence, None)
        self._decoding.pop(sequence, None)

    def _admit_ready(self, step: Step) -> bool:
        """Starts ready requests while the step has room; False where memory or the cap forbids the next one."""
        while step.room and self._ready:
            sequence = self._ready[0]
            if not self._can_admit(sequence):
                return False
            self._admit(self._ready.popleft())
            if sequence in self._decoding:
                step.add_decode(sequence)
            else:
                step.add_suffix(sequence)
        return True

    def _add_ready(self, step: Step) -> bool:
        """Starts requests whose prefix is complete, and continues the prefixes of others; returns as `_admit_ready`."""
        if not self._admit_ready(step):
            return False
        for node in list(self._prefixes):
            node.add_to(step)
            if node.is_complete_after(step):  # in each layer, a step's KV is written before anything attends
                self._ready.extend(self._prefixes.pop(node))
                if not self._admit_ready(step):
                    return False
        return True

    def _can_admit(self, sequence: Sequence) -> bool:
        return self.has_free_place and self._admission.fits(sequence)

    def _admit(self, sequence: Sequence) -> None:
        self._admission.admit(sequence)
        is_prefilled = sequence.num_computed >= sequence.num_suffix  # swapped in
        (self._decoding if is_prefilled else self._prefilling)[sequence] = None

    def _start_prefix(self, node: PrefixNode | None, waiting: Iterable[Sequence]) -> int:
        """Gives a prefix memory, and queues its requests; returns the tokens that it took blocks for."""
        num_tokens = 0 if node is None else node.acquire(self._pool, self._config.block_size)
        if node is None or node.is_complete:
            self._ready.extend(waiting)
        else:
            self._prefixes.setdefault(node, []).extend(waiting)
        return num_tokens
