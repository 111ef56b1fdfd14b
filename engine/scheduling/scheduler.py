"""Which tokens the next step computes: three queues, bounded by chunk size and KV memory.

BatchLLM sections 4.3.1 to 4.3.3: decode tokens first, then suffixes of requests whose prefix is ready, then the
prefixes of the next groups. A group's suffixes start in the step that completes its prefix, or later: in each layer, a
step's KV is written before anything attends. The prefix is freed when its last request finishes. When answers grow
beyond the memory that was set aside for them, the request admitted last gives its KV up. What is a matter of choice is
decided in `engine.scheduling.policies`.
"""

from collections.abc import Iterable

from engine.config import EngineConfig
from engine.kv.block_pool import BlockPool
from engine.scheduling.admission import Admission
from engine.scheduling.policies.preemption import SwapSpace
from engine.scheduling.policies.reserve import OutputReserve
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.scheduled_group import ScheduledGroup
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step


class Scheduler:
    """State of one run: the queues, and the blocks.

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
        self._queues = RequestQueues(groups, pool=pool, config=config, admission=self._admission)
        # A step holds both prompts and decode tokens only where any part of a prompt will do at any time.
        self._mixes_phases = config.batching == "continuous" and config.prefill == "chunked"

    @property
    def num_unfinished(self) -> int:
        return self._queues.num_unfinished

    @property
    def num_running(self) -> int:
        return self._queues.num_running

    @property
    def can_start(self) -> bool:
        """Whether a waiting request that fits into memory would start: no batch and no cap keeps it."""
        return self._config.batching == "continuous" and self._queues.has_free_place

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
        return Step(room=self._config.max_num_batched_tokens)

    def next_step(self, *, is_settled: bool = True) -> Step:
        """Takes work from the queues, and memory for it. Empty when everything is finished.

        Args:
            is_settled: False while a step is under way whose outcome is not booked yet. Then nobody loses memory: the
                step is empty, too, where somebody would have to, or where there is nothing to do without that outcome.
        """
        step = self.new_step()
        if self.num_unfinished == 0:
            return step
        has_memory = self._schedule(step, may_preempt=is_settled)
        if not is_settled:
            return step if has_memory else self.new_step()
        if step.is_empty:
            self.evict_idle_prefixes()
            self._schedule(step, may_preempt=True)
        assert not step.is_empty, "requests are left, but none of them could be given memory"
        return step

    def add_decodes(self, step: Step, *, may_preempt: bool = True) -> bool:
        """Adds decode tokens, of the oldest requests first, which take memory of those admitted later.

        Args:
            may_preempt: False while steps are under way: requests without memory wait until all are booked.
        Returns:
            whether no request had to wait for memory.
        """
        has_all = True
        decoding = self._queues.decoding
        # Oldest first, so that whoever loses memory to an older one has not been scheduled yet.
        for sequence in sorted(decoding, key=lambda s: s.admission):
            if step.room == 0:
                break
            if sequence not in decoding:
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
            self._queues.add_prefills(step)
        else:
            self._queues.start_batch()
            self._queues.add_batch_prefills(step)

    def complete_step(self, step: Step) -> None:
        """Books the step's KV as written. What the model said is booked by `continue_decoding` and `finish`.

        A device or process that computes steps in turn may be sent the next one once the last is booked here.
        """
        for node, count in step.prefixes.items():
            node.num_computed += count
        for sequence, _ in step.suffixes:
            sequence.num_reused = min(sequence.num_reused, sequence.num_computed)
        for sequence, count in (*step.decodes, *step.suffixes):
            sequence.num_computed += count
            if self._admission.cache is not None:
                self._admission.cache.remember(sequence, sequence.num_computed - count)
        self._queues.release_computed_prefixes()

    def continue_decoding(self, sequence: Sequence) -> None:
        """The sequence has tokens to compute beyond its prompt."""
        self._queues.continue_decoding(sequence)

    def finish(self, sequence: Sequence) -> None:
        """The sequence is answered: its KV is freed, and its prefix with it when it was the last."""
        self._reserve.book(sequence)
        self._drop(sequence)

    def evict_idle_prefixes(self) -> None:
        """Frees every prefix that the next request does not need. Called when nothing runs, so none is in use."""
        self._queues.evict_idle_prefixes()

    def _schedule(self, step: Step, *, may_preempt: bool) -> bool:
        """Adds work to a step; whether no decoding request had to wait for memory."""
        if self._mixes_phases:
            if not self.add_decodes(step, may_preempt=may_preempt):
                return False
            self._queues.add_prefills(step)
        else:
            self.add_prompts(step)
            if step.is_empty:
                return self.add_decodes(step, may_preempt=may_preempt)
        return True

    def _grow(self, sequence: Sequence, num_tokens: int, step: Step) -> bool:
        """Takes blocks for `num_tokens` own tokens from whoever was admitted last; False if that is this one itself."""
        while not self._admission.can_grow(sequence, num_tokens):
            latest = max((*self._queues.decoding, *self._queues.prefilling), key=lambda s: s.admission)
            self._preempt(latest, step)
            if latest is sequence:
                return False
        sequence.reserve(self.pool, num_tokens, self._config.block_size)
        return True

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Takes a request's KV. It goes to the head of the queue, or is killed where another one still runs."""
        step.num_preempted += 1
        if self._config.preemption == "kill" and self.num_running > 1:
            step.killed.append(sequence)
            self._drop(sequence)
            self._queues.drop_freed_prefixes()
            return
        self._queues.stop(sequence)
        if self._swap.save(sequence, self._config.block_size):
            step.num_swapped += 1
            sequence.free_blocks(self.pool)
        else:
            sequence.release(self.pool)
        self._queues.ready.appendleft(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self._queues.stop(sequence)
        sequence.release(self.pool)
        if sequence.node is not None:
            sequence.node.finish_user(self.pool)
        if self._admission.cache is not None:
            self._admission.cache.forget(sequence)
        self._queues.num_unfinished -= 1
        sequence.is_answered = True
