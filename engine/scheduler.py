"""Which tokens the next step computes: three queues, bounded by chunk size and KV memory.

BatchLLM sections 4.3.1 to 4.3.3: decode tokens first, then suffixes of requests whose prefix is ready, then the
prefixes of the next groups. A group's prefix is complete before its suffixes start, and its memory is freed when its
last request finishes. When answers grow beyond the memory that was set aside for them, the request admitted last gives
its KV up. What is a matter of choice is decided in `engine.policies`.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from engine.admission import Admission
from engine.block_pool import BlockPool
from engine.config import EngineConfig
from engine.policies.batching import admission_window_tokens
from engine.policies.order import order_groups
from engine.policies.preemption import SwapSpace
from engine.policies.reserve import OutputReserve
from engine.prefix_node import PrefixNode
from engine.scheduled_group import ScheduledGroup
from engine.sequence import Sequence
from engine.step import Step


class Scheduler:
    """State of one run: waiting groups, the three queues, and the blocks.

    Args:
        groups: what is to be answered, in any order.
        pool: KV blocks, as `make_pool` makes it; each request of the groups, with its prefix, fits into it alone.
        config: the policies, and the limits of a step.
        swap: host memory for the KV of preempted requests; of no blocks but under preemption "swap".
    """

    def __init__(
        self, groups: Iterable[ScheduledGroup], *, pool: BlockPool, config: EngineConfig, swap: SwapSpace
    ) -> None:
        self.pool = pool
        self._config = config
        self._swap = swap
        self._reserve = OutputReserve(config.output_reserve)
        self._admission = Admission(pool, config.block_size, self._reserve, swap)
        self._max_running = math.inf if config.max_running_requests == "memory" else config.max_running_requests
        # A step holds both prompts and decode tokens only where any part of a prompt will do at any time.
        self._mixes_phases = config.batching == "continuous" and config.prefill == "chunked"
        self._waiting_groups = deque(order_groups(groups, config.order))
        # Prefixes being computed, each with the requests that wait for it without memory of their own.
        self._prefix_queue: dict[PrefixNode, list[Sequence]] = {}
        self._suffix_queue: deque[Sequence] = deque()
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        self.num_unfinished = sum(len(group.sequences) for group in self._waiting_groups)

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def can_start(self) -> bool:
        """Whether a waiting request that fits into memory would start: no batch and no cap keeps it."""
        return self._config.batching == "continuous" and self.num_running < self._max_running

    @property
    def num_request_blocks(self) -> int:
        """KV blocks of running requests' own tokens, tokens still expected included; a shared one counts once."""
        return self.pool.num_used - self.pool.num_prefix_blocks

    @property
    def num_prefix_blocks(self) -> int:
        """KV blocks of shared prefixes, idle ones included: computed, and kept for requests that wait."""
        return self.pool.num_prefix_blocks

    @property
    def num_cached_blocks(self) -> int:
        """KV blocks that nobody owns and the LRU cache still keeps; `BlockPool.num_free` counts them, too."""
        return self.pool.num_idle

    @property
    def num_swapped_blocks(self) -> int:
        """Blocks in host memory that hold the KV of preempted requests. In KV memory, waiting requests hold nothing."""
        return self._swap.num_used

    def new_step(self) -> Step:
        """A step that nothing has been added to."""
        return Step(room=self._config.chunk_tokens)

    def next_step(self) -> Step:
        """Takes work from the queues, and memory for it. Empty only when everything is finished."""
        step = self.new_step()
        if self.num_unfinished == 0:
            return step
        self._schedule(step)
        if step.is_empty:
            self.evict_idle_prefixes()
            self._schedule(step)
        assert not step.is_empty, "requests are left, but none of them could be given memory"
        return step

    def add_decodes(self, step: Step, *, may_preempt: bool = True) -> bool:
        """Adds decode tokens, of the oldest requests first, which take memory of those admitted later.

        Args:
            may_preempt: False while prompts are computed elsewhere: requests without memory wait until all are done.
        Returns:
            whether no request had to wait for memory.
        """
        has_all = True
        # Oldest first, so that whoever loses memory to an older one has not been scheduled yet.
        for sequence in sorted(self._decoding, key=lambda s: s.admission):
            if step.room == 0:
                break
            if sequence not in self._decoding:
                continue
            needed = sequence.num_computed + min(sequence.num_uncomputed, step.room)
            if needed <= len(sequence.block_ids) * self._config.block_size:
                step.add_decode(sequence)
            elif may_preempt or self._admission.can_grow(sequence, needed):
                if not self._grow(sequence, needed, step):
                    break
                step.add_decode(sequence)
            else:
                has_all = False
        return has_all

    def add_prompts(self, step: Step) -> None:
        """Adds prompts alone, for a process that decodes nothing; starts requests as memory allows."""
        if self._mixes_phases:
            self._add_prefills(step)
        else:
            self._start_batch()
            self._add_batch_prefills(step)

    def complete_step(self, step: Step) -> None:
        """Books the step's KV as written. What the model said is booked by `continue_decoding` and `finish`.

        A process that computes steps of prompts in turn may be sent the next one once the last is booked here.
        """
        for node, count in step.prefixes.items():
            node.num_computed += count
        for sequence, _ in step.suffixes:
            sequence.num_reused = min(sequence.num_reused, sequence.num_computed)
        for sequence, count in (*step.decodes, *step.suffixes):
            sequence.num_computed += count
            if self._admission.cache is not None:
                self._admission.cache.remember(sequence, sequence.num_computed - count)
        for node in [node for node in self._prefix_queue if node.is_complete]:
            self._suffix_queue.extend(self._prefix_queue.pop(node))

    def continue_decoding(self, sequence: Sequence) -> None:
        """The sequence has tokens to compute beyond its prompt."""
        self._prefilling.pop(sequence, None)
        self._decoding[sequence] = None

    def finish(self, sequence: Sequence) -> None:
        """The sequence is answered: its KV is freed, and its prefix with it when it was the last."""
        self._reserve.book(sequence)
        self._drop(sequence)

    def _schedule(self, step: Step) -> None:
        if self._mixes_phases:
            self.add_decodes(step)
            self._add_prefills(step)
        else:
            self._start_batch()
            self._add_batch_prefills(step)
            if step.is_empty:
                self.add_decodes(step)

    def _grow(self, sequence: Sequence, num_tokens: int, step: Step) -> bool:
        """Takes blocks for `num_tokens` own tokens from whoever was admitted last; False if that is this one itself."""
        while not self._admission.can_grow(sequence, num_tokens):
            latest = max((*self._decoding, *self._prefilling), key=lambda s: s.admission)
            self._preempt(latest, step)
            if latest is sequence:
                return False
        sequence.reserve(self.pool, num_tokens, self._config.block_size)
        return True

    def _add_prefills(self, step: Step) -> None:
        """Continues prompts, then starts requests and prefixes as long as the step has room."""
        for sequence in self._prefilling:
            step.add_suffix(sequence)
        if not self._admit_ready(step):
            return
        for node in self._prefix_queue:
            step.add_chain(node)
        while step.room and self._waiting_groups and self.num_running < self._max_running:
            firsts = [waiting[0] for waiting in self._prefix_queue.values()]
            if not self._admission.fits_group(self._waiting_groups[0], firsts):
                return
            group = self._waiting_groups.popleft()
            self._start_prefix(group.node, group.sequences)
            if group.node is not None and not group.node.is_complete:
                step.add_chain(group.node)
                continue
            self._suffix_queue.extend(group.sequences)
            if not self._admit_ready(step):
                return

    def _admit_ready(self, step: Step) -> bool:
        """Starts waiting requests while the step has room; False where memory, or the cap, is what lacks."""
        while step.room and self._suffix_queue:
            sequence = self._suffix_queue[0]
            if not self._can_admit(sequence):
                return False
            self._admit(self._suffix_queue.popleft())
            if sequence in self._decoding:
                step.add_decode(sequence)
            else:
                step.add_suffix(sequence)
        return True

    def _start_batch(self) -> None:
        """Gives memory to as many requests as may start together, whether their prefix is computed yet or not."""
        window = admission_window_tokens(
            self._config.batching, is_idle=self.num_running == 0, chunk_tokens=self._config.chunk_tokens
        )
        window = self._admit_window(window)
        while window > 0 and self._waiting_groups and self.num_running < self._max_running:
            if not self._admission.fits_group(self._waiting_groups[0], ()):
                return
            group = self._waiting_groups.popleft()
            window -= self._start_prefix(group.node, ())
            self._admit(group.sequences[0])
            window -= group.sequences[0].num_uncomputed
            self._suffix_queue.extend(group.sequences[1:])
            window = self._admit_window(window)

    def _admit_window(self, window: float) -> float:
        """Starts waiting requests while the window has tokens left; returns what is left, nothing if memory lacks."""
        while window > 0 and self._suffix_queue:
            if not self._can_admit(self._suffix_queue[0]):
                return 0
            sequence = self._suffix_queue.popleft()
            self._admit(sequence)
            window -= sequence.num_uncomputed
        return window

    def _add_batch_prefills(self, step: Step) -> None:
        """Prompts that have memory, in pieces or whole; requests before the prefixes that others wait for."""
        if self._config.prefill == "chunked":
            for sequence in self._ready_prompts():
                step.add_suffix(sequence)
            for node in self._prefix_queue:
                step.add_chain(node)
        else:
            tops = dict.fromkeys(node.next_to_compute() for node in self._prefix_queue)
            step.add_packed([*self._ready_prompts(), *tops], self._config.packing, self.pool.num_blocks)

    def _ready_prompts(self) -> Iterator[Sequence]:
        for sequence in self._prefilling:
            if sequence.is_ready and sequence.num_uncomputed:
                if self._admission.cache is not None and not sequence.has_started:
                    self._admission.cache.reuse(sequence)  # of what was computed since it was admitted
                yield sequence

    def _can_admit(self, sequence: Sequence) -> bool:
        return self.num_running < self._max_running and self._admission.fits(sequence)

    def _admit(self, sequence: Sequence) -> None:
        self._admission.admit(sequence)
        is_prefilled = sequence.num_computed >= sequence.num_suffix  # swapped in
        (self._decoding if is_prefilled else self._prefilling)[sequence] = None

    def _start_prefix(self, node: PrefixNode | None, waiting: Iterable[Sequence]) -> int:
        """Gives a prefix memory, and queues it where it is to be computed; returns of how many tokens, first asked."""
        if node is None:
            return 0
        num_tokens = node.acquire(self.pool, self._config.block_size)
        if not node.is_complete:
            self._prefix_queue.setdefault(node, []).extend(waiting)
        return num_tokens

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Takes a request's KV. It goes to the head of the queue, or is killed where another one still runs."""
        step.num_preempted += 1
        if self._config.preemption == "kill" and self.num_running > 1:
            step.killed.append(sequence)
            self._drop(sequence)
            for node in [node for node in self._prefix_queue if not node.holds_blocks]:
                del self._prefix_queue[node]
            return
        self._decoding.pop(sequence, None)
        self._prefilling.pop(sequence, None)
        if self._swap.save(sequence, self._config.block_size):
            step.num_swapped += 1
            sequence.free_blocks(self.pool)
        else:
            sequence.release(self.pool)
        self._suffix_queue.appendleft(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self._prefilling.pop(sequence, None)
        self._decoding.pop(sequence, None)
        sequence.release(self.pool)
        if sequence.node is not None:
            sequence.node.finish_user(self.pool)
        if self._admission.cache is not None:
            self._admission.cache.forget(sequence)
        self.num_unfinished -= 1

    def evict_idle_prefixes(self) -> None:
        """Frees every prefix that the next request does not need. Called when nothing runs, so none is in use."""
        queued: defaultdict[PrefixNode | None, list[Sequence]] = defaultdict(list)
        for sequence in self._suffix_queue:
            queued[sequence.node].append(sequence)
        ready = [ScheduledGroup(node=node, sequences=sequences) for node, sequences in queued.items()]
        ready += [ScheduledGroup(node=node, sequences=waiting) for node, waiting in self._prefix_queue.items()]
        groups = [*ready, *self._waiting_groups]
        kept = set(groups[0].node.chain()) if groups[0].node is not None else set()
        nodes = {node for group in groups if group.node is not None for node in group.node.chain()}
        for node in sorted(nodes - kept, key=lambda node: -node.start):
            node.release(self.pool)
        self._suffix_queue.clear()
        self._prefix_queue.clear()
        self._waiting_groups = deque(groups)
