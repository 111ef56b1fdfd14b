"""Which tokens the next step computes: three queues, bounded by chunk size and KV memory, not by a request count.

BatchLLM sections 4.3.1 to 4.3.3: decode tokens first, then suffixes of requests whose prefix is ready, then the
prefixes of the next groups, groups with the larger decode-to-prefill ratio first. A group's prefix is complete before
its suffixes start, and its memory is freed when its last request finishes. When answers grow beyond the memory that was
set aside for them, the request admitted last gives its KV up and is computed again later.
"""

import math
from collections import defaultdict, deque
from collections.abc import Iterable

from engine.block_pool import BlockPool
from engine.prefix_node import PrefixNode
from engine.scheduled_group import ScheduledGroup
from engine.sequence import Sequence, most_extra_tokens
from engine.step import Step

_ANSWERS_FOR_AN_ESTIMATE = 16


class Scheduler:
    """State of one run: waiting groups, the three queues, and the blocks.

    Args:
        groups: what is to be answered, in any order.
        pool: KV blocks; each request of the groups, with its prefix, fits into it alone.
        block_size: tokens in a block.
        chunk_tokens: most tokens in a step (S_chunk).
        output_reserve: share of an answer's expected length that is set aside when a request is admitted; 0 admits by
            what is held now (Algorithm 2 of BatchLLM), 1 leaves preemption to answers longer than expected.
    """

    def __init__(
        self,
        groups: Iterable[ScheduledGroup],
        *,
        pool: BlockPool,
        block_size: int,
        chunk_tokens: int,
        output_reserve: float,
    ) -> None:
        self.pool = pool
        self._block_size = block_size
        self._chunk_tokens = chunk_tokens
        self._output_reserve = output_reserve
        self._waiting_groups = deque(sorted(groups, key=lambda group: -group.decode_to_prefill_ratio))
        self._prefix_queue: list[ScheduledGroup] = []
        self._suffix_queue: deque[Sequence] = deque()
        self._prefilling: dict[Sequence, None] = {}
        self._decoding: dict[Sequence, None] = {}
        self._num_admitted = 0
        self._num_answers = 0
        self._num_answer_tokens = 0
        self.num_unfinished = sum(len(group.sequences) for group in self._waiting_groups)

    @property
    def num_running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    def next_step(self) -> Step:
        """Takes work from the queues, and memory for it. Empty only when everything is finished."""
        step = Step(room=self._chunk_tokens)
        if self.num_unfinished == 0:
            return step
        self._schedule_decodes(step)
        self._schedule_prefills(step)
        if step.is_empty:
            self._evict_idle_prefixes()
            self._schedule_prefills(step)
        assert not step.is_empty, "requests are left, but none of them could be given memory"
        return step

    def complete_step(self, step: Step) -> None:
        """Books the step's KV as written. What the model said is booked by `continue_decoding` and `finish`."""
        for node, count in step.prefixes.items():
            node.num_computed += count
        for sequence, count in (*step.decodes, *step.suffixes):
            sequence.num_computed += count
        for group in self._prefix_queue:
            if group.is_ready:
                self._suffix_queue.extend(group.sequences)
        self._prefix_queue = [group for group in self._prefix_queue if not group.is_ready]

    def continue_decoding(self, sequence: Sequence) -> None:
        """The sequence has tokens to compute beyond its prompt."""
        self._prefilling.pop(sequence, None)
        self._decoding[sequence] = None

    def finish(self, sequence: Sequence) -> None:
        """The sequence is answered: its KV is freed, and its prefix with it when it was the last."""
        self._prefilling.pop(sequence, None)
        self._decoding.pop(sequence, None)
        sequence.release(self.pool)
        if sequence.node is not None:
            sequence.node.finish_user(self.pool)
        self.num_unfinished -= 1
        self._num_answers += 1
        self._num_answer_tokens += sequence.num_output_tokens

    def _schedule_decodes(self, step: Step) -> None:
        """Oldest first, so that whoever loses memory to an older one has not been scheduled yet."""
        for sequence in sorted(self._decoding, key=lambda s: s.admission):
            if step.room == 0:
                return
            if sequence not in self._decoding:
                continue
            num_tokens = min(len(sequence.next_tokens), step.room)
            needed = sequence.num_computed + num_tokens
            while self._num_missing_blocks(sequence, needed) > self.pool.num_free:
                latest = max((*self._decoding, *self._prefilling), key=lambda s: s.admission)
                self._preempt(latest, step)
                if latest is sequence:
                    return
            sequence.reserve(self.pool, needed, self._block_size)
            step.decodes.append((sequence, num_tokens))
            step.room -= num_tokens

    def _schedule_prefills(self, step: Step) -> None:
        for sequence in self._prefilling:
            self._add_suffix(step, sequence)
        if not self._admit_sequences(step):
            return
        for group in self._prefix_queue:
            self._add_prefix(step, group)
        while step.room and self._waiting_groups and self._has_memory_for(self._waiting_groups[0]):
            group = self._waiting_groups.popleft()
            if group.node is not None:
                group.node.acquire(self.pool, self._block_size)
            if group.is_ready:
                self._suffix_queue.extend(group.sequences)
                if not self._admit_sequences(step):
                    return
            else:
                self._prefix_queue.append(group)
                self._add_prefix(step, group)

    def _admit_sequences(self, step: Step) -> bool:
        """Gives memory to waiting requests while the step has room; False where memory is what lacks."""
        while step.room and self._suffix_queue:
            sequence = self._suffix_queue[0]
            num_tokens = self._num_tokens_to_reserve(sequence)
            if self._num_missing_blocks(sequence, num_tokens) > self.pool.num_free:
                return False
            self._suffix_queue.popleft()
            sequence.reserve(self.pool, num_tokens, self._block_size)
            sequence.admission = self._num_admitted
            self._num_admitted += 1
            if sequence.node is not None:
                sequence.num_charged += sequence.node.charge()
            self._prefilling[sequence] = None
            self._add_suffix(step, sequence)
        return True

    def _add_suffix(self, step: Step, sequence: Sequence) -> None:
        num_tokens = min(len(sequence.next_tokens), step.room)
        if num_tokens:
            step.suffixes.append((sequence, num_tokens))
            step.room -= num_tokens

    def _add_prefix(self, step: Step, group: ScheduledGroup) -> None:
        """Continues the group's chain from the top; a node below another starts once that one is in the step whole."""
        for node in group.node.chain() if group.node is not None else ():
            num_left = len(node.token_ids) - node.num_computed
            if num_left and node not in step.prefixes and step.room:
                step.prefixes[node] = min(num_left, step.room)
                step.room -= step.prefixes[node]
            if step.prefixes.get(node, 0) < num_left:
                return

    def _has_memory_for(self, group: ScheduledGroup) -> bool:
        """Whether a prefix can be held with at least one request on it, and one on each prefix being computed."""
        starting = [*self._prefix_queue, group]
        num_missing = sum(
            self._num_missing_blocks(g.sequences[0], self._num_tokens_to_reserve(g.sequences[0])) for g in starting
        )
        if group.node is not None:
            num_missing += group.node.num_missing_blocks(self._block_size)
        return num_missing <= self.pool.num_free

    def _num_missing_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) - len(sequence.block_ids)

    def _num_tokens_to_reserve(self, sequence: Sequence) -> int:
        """Own tokens whose KV is set aside on admission: those known, and the share of those expected."""
        most = sequence.num_suffix + most_extra_tokens(sequence.request)
        expected = most
        if sequence.request.mode == "generate" and self._num_answers >= _ANSWERS_FOR_AN_ESTIMATE:
            expected = sequence.num_suffix + math.ceil(self._num_answer_tokens / self._num_answers)
        num_expected = max(0, min(expected, most) - sequence.length)
        return sequence.length + math.ceil(num_expected * self._output_reserve)

    def _preempt(self, sequence: Sequence, step: Step) -> None:
        """Takes a request's KV; it goes to the head of the queue and is computed again (recompute)."""
        sequence.release(self.pool)
        self._decoding.pop(sequence, None)
        self._prefilling.pop(sequence, None)
        self._suffix_queue.appendleft(sequence)
        step.num_preempted += 1

    def _evict_idle_prefixes(self) -> None:
        """Frees every prefix that the next request does not need. Called when nothing runs, so none is in use."""
        queued: defaultdict[PrefixNode | None, list[Sequence]] = defaultdict(list)
        for sequence in self._suffix_queue:
            queued[sequence.node].append(sequence)
        ready = [ScheduledGroup(node=node, sequences=sequences) for node, sequences in queued.items()]
        groups = [*ready, *self._prefix_queue, *self._waiting_groups]
        kept = set(groups[0].node.chain()) if groups[0].node is not None else set()
        nodes = {node for group in groups if group.node is not None for node in group.node.chain()}
        for node in sorted(nodes - kept, key=lambda node: -node.start):
            node.release(self.pool)
        self._suffix_queue.clear()
        self._prefix_queue.clear()
        self._waiting_groups = deque(groups)
