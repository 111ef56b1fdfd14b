"""Who waits and who runs: groups not started, prefixes being computed, requests with and without KV memory."""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from engine.config import EngineConfig
from engine.kv.block_pool import BlockPool
from engine.scheduling.admission import Admission
from engine.scheduling.policies.batching import admission_window_tokens
from engine.scheduling.policies.order import order_groups
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.scheduled_group import ScheduledGroup
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step


class RequestQueues:
    """The queues of one run, and how requests and prefixes move on from them as memory and the cap allow.

    Attributes:
        waiting_groups: not started, in their order.
        prefixes: being computed, each with the requests that wait for it without memory of their own.
        ready: requests without memory whose prefix is computed; those that lost their memory come first.
        prefilling, decoding: requests that hold KV.
        num_unfinished: requests not answered yet, running or not.
    """

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

    def add_prefills(self, step: Step) -> None:
        """Continues prompts, then starts requests and prefixes as long as the step has room.

        Requests start in the step that completes their prefix: each layer writes a step's KV before anything attends.
        """
        for sequence in self.prefilling:
            step.add_suffix(sequence)
        # A prefix that is not complete leaves no room: another one never takes the memory of those that wait for it.
        while self._add_ready(step) and step.room and self.waiting_groups and self.has_free_place:
            if not self._admission.fits_group(self.waiting_groups[0]):
                return
            group = self.waiting_groups.popleft()
            self._start_prefix(group.node, group.sequences)

    def start_batch(self) -> None:
        """Gives memory to as many requests as may start together, whether their prefix is computed yet or not."""
        window = admission_window_tokens(
            self._config.batching,
            is_idle=self.num_running == 0,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
        )
        window = self._admit_window(window)
        while window > 0 and self.waiting_groups and self.has_free_place:
            if not self._admission.fits_group(self.waiting_groups[0]):
                return
            group = self.waiting_groups.popleft()
            window -= self._start_prefix(group.node, ())
            self._admit(group.sequences[0])
            window -= group.sequences[0].num_uncomputed
            self.ready.extend(group.sequences[1:])
            window = self._admit_window(window)

    def add_batch_prefills(self, step: Step) -> None:
        """Prompts that have memory, in pieces or whole; requests before the prefixes that others wait for."""
        if self._config.prefill == "chunked":
            for sequence in self._ready_prompts():
                step.add_suffix(sequence)
            for node in self.prefixes:
                step.add_chain(node)
        else:
            tops = dict.fromkeys(node.next_to_compute() for node in self.prefixes)
            step.add_packed([*self._ready_prompts(), *tops], self._config.packing, self._pool.num_blocks)

    def release_computed_prefixes(self) -> None:
        """Requests whose prefix is complete now are ready."""
        for node in [node for node in self.prefixes if node.is_complete]:
            self.ready.extend(self.prefixes.pop(node))

    def drop_freed_prefixes(self) -> None:
        """Prefixes that are no longer computed, because the last request that needed them is gone."""
        for node in [node for node in self.prefixes if not node.holds_blocks]:
            del self.prefixes[node]

    def continue_decoding(self, sequence: Sequence) -> None:
        self.prefilling.pop(sequence, None)
        self.decoding[sequence] = None

    def stop(self, sequence: Sequence) -> None:
        """The sequence runs no longer."""
        self.prefilling.pop(sequence, None)
        self.decoding.pop(sequence, None)

    def evict_idle_prefixes(self) -> None:
        """Frees every prefix that the next request does not need. Called when nothing runs, so none is in use."""
        queued: defaultdict[PrefixNode | None, list[Sequence]] = defaultdict(list)
        for sequence in self.ready:
            queued[sequence.node].append(sequence)
        ready = [ScheduledGroup(node=node, sequences=sequences) for node, sequences in queued.items()]
        ready += [ScheduledGroup(node=node, sequences=waiting) for node, waiting in self.prefixes.items()]
        groups = [*ready, *self.waiting_groups]
        kept = set(groups[0].node.chain()) if groups[0].node is not None else set()
        nodes = {node for group in groups if group.node is not None for node in group.node.chain()}
        for node in sorted(nodes - kept, key=lambda node: -node.start):
            node.release(self._pool)
        self.ready.clear()
        self.prefixes.clear()
        self.waiting_groups = deque(groups)

    def _admit_ready(self, step: Step) -> bool:
        """Starts waiting requests while the step has room; False where memory, or the cap, is what lacks."""
        while step.room and self.ready:
            sequence = self.ready[0]
            if not self._can_admit(sequence):
                return False
            self._admit(self.ready.popleft())
            if sequence in self.decoding:
                step.add_decode(sequence)
            else:
                step.add_suffix(sequence)
        return True

    def _add_ready(self, step: Step) -> bool:
        """Starts requests whose prefix is complete, and continues the others' prefixes; returns as `_admit_ready`."""
        if not self._admit_ready(step):
            return False
        for node in list(self.prefixes):
            step.add_chain(node)
            if step.completes(node):
                self.ready.extend(self.prefixes.pop(node))
                if not self._admit_ready(step):
                    return False
        return True

    def _admit_window(self, window: float) -> float:
        """Starts waiting requests while the window has tokens left; returns what is left, nothing if memory lacks."""
        while window > 0 and self.ready:
            if not self._can_admit(self.ready[0]):
                return 0
            sequence = self.ready.popleft()
            self._admit(sequence)
            window -= sequence.num_uncomputed
        return window

    def _ready_prompts(self) -> Iterator[Sequence]:
        for sequence in self.prefilling:
            if sequence.is_ready and sequence.num_uncomputed:
                if self._admission.cache is not None and not sequence.has_started:
                    self._admission.cache.reuse(sequence)  # of what was computed since it was admitted
                yield sequence

    def _can_admit(self, sequence: Sequence) -> bool:
        return self.has_free_place and self._admission.fits(sequence)

    def _admit(self, sequence: Sequence) -> None:
        self._admission.admit(sequence)
        is_prefilled = sequence.num_computed >= sequence.num_suffix  # swapped in
        (self.decoding if is_prefilled else self.prefilling)[sequence] = None

    def _start_prefix(self, node: PrefixNode | None, waiting: Iterable[Sequence]) -> int:
        """Gives a prefix memory, and queues those that wait for it; returns of how many tokens, first asked."""
        num_tokens = 0 if node is None else node.acquire(self._pool, self._config.block_size)
        if node is None or node.is_complete:
            self.ready.extend(waiting)
        else:
            self.prefixes.setdefault(node, []).extend(waiting)
        return num_tokens
