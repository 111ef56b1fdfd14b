"""Which tokens each step computes, and what its results do to the requests (BatchLLM 4.3.1 to 4.3.3).

Decode tokens come first, then suffixes of requests whose prefix is ready, then the prefixes of the next groups. When
answers outgrow the memory set aside for them, the request that was admitted last is preempted.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequences
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from engine.completion import FinishReason
from engine.config import EngineConfig
from engine.kv.block_pool import BlockPool
from engine.scheduling.admission import Admission, OutputReserve
from engine.scheduling.policies.batching import BatchQueues
from engine.scheduling.policies.preemption import SwapSpace, evict_idle_prefixes, make_room
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.sequence import ScheduledGroup, Sequence
from engine.scheduling.step import Step

if TYPE_CHECKING:
    from engine.scheduling.prompt_lookup import PromptLookup

Work = Literal["all", "prompts", "decodes"]
Follow = Callable[[Sequence, int, int], tuple[Sequences[int], FinishReason | None]]
"""Given a sequence, the index of an own token and that token, returns the forced tokens that follow it, as many as the
answer has room for, and why the answer ends with them, unless by its length."""


class Scheduler:
    """State of one run, with `num_unfinished` requests that are not answered yet, running or not. `schedule` chooses a
    step's tokens and allocates their KV, `commit` applies its results.

    Args:
        pool: from `make_pool`; it can hold each request of the groups alone, with its prefix.
        swap: host memory for the KV of preempted requests; None where nothing is swapped.
        lookup: guesses tokens of answers; None where nothing is guessed.
    """

    def __init__(
        self,
        groups: Iterable[ScheduledGroup],
        *,
        pool: BlockPool,
        config: EngineConfig,
        swap: SwapSpace | None,
        lookup: "PromptLookup | None" = None,
    ) -> None:
        self.pool = pool
        self.config = config
        self.swap = swap
        self._lookup = lookup
        self.admission = Admission(pool, OutputReserve(config.output_reserve), swap)
        has_batches = config.batching != "continuous" or config.prefill != "chunked"
        make_queues = BatchQueues if has_batches else RequestQueues
        self.queues: RequestQueues = make_queues(groups, config=config, admission=self.admission)
        self.num_unfinished = sum(map(len, self.queues.waiting_groups))
        self._in_flight: list[Step] = []  # scheduled and not committed
        self._unused: Step | None = None  # the latest step if it is empty; it may have counted preemptions

    def schedule(self, work: Work = "all") -> Step:
        """The next step, with KV memory for all that it computes. Empty when every request is answered.

        Earlier steps need only be launched, not committed: they run in order, so their KV counts as written. Until they
        are committed, no request is preempted: the step is empty where one would have to be, or where all work depends
        on a commit. Of "prompts" and "decodes", for two processes, no answer goes on before its step is committed.
        """
        prepare = self._advance if work == "all" else self._mark_computed
        for earlier in self._in_flight:
            prepare(earlier)
        may_preempt = not self._in_flight
        step = self._unused or Step(block_size=self.config.block_size, room=self.config.step_tokens)
        step.is_blocked = False
        if self.num_unfinished:
            self._add_work(step, work, may_preempt=may_preempt)
            if work == "all" and step.is_blocked:
                step = Step(block_size=self.config.block_size, room=self.config.step_tokens)
            elif work != "decodes" and may_preempt and step.is_empty:
                evict_idle_prefixes(self)
                self._add_work(step, work, may_preempt=True)
                assert not step.is_empty, "requests are left, but none of them could be given memory"
        if self._lookup is not None:
            self._lookup.add_guesses(step)
        step.finalize(self.pool)
        self._unused = step if step.is_empty else None
        if not step.is_empty:
            self._in_flight.append(step)
        return step

    def _mark_computed(self, step: Step) -> None:
        """Counts the step's KV as written."""
        if step.is_computed:
            return
        step.is_computed = True
        for node, count in step.prefixes.items():
            node.num_computed += count
        for sequence, _ in step.suffixes:
            sequence.num_reused = min(sequence.num_reused, sequence.num_computed)
        for sequence, count in (*step.decodes, *step.suffixes):
            first, known = sequence.num_computed, sequence.length
            sequence.num_computed = first + count if first + count < known else known  # guesses may be wrong
            self.pool.remember(sequence, first)
        step.left_block_ids = self.pool.leave(step)
        self.queues.release_computed_prefixes()

    def _advance(self, step: Step) -> None:
        """Appends an unknown token to each answer of the step, and starts the next label of each scored request.

        An unknown token is the negative id -1 - row (`TokenBatch`). Answers that have reached their longest length get
        none, and neither do answers with guessed tokens, until it is known which guesses are right.
        """
        if step.is_advanced:
            return
        self._mark_computed(step)
        step.is_advanced = True
        decoding = self.queues.decoding
        for row, (sequence, place) in enumerate(step.sampled):
            is_last = place + 1 == len(sequence.own_token_ids)
            if sequence.finish_reason or is_last or sequence.num_guesses:
                continue
            if place == sequence.length:  # else the step before was committed meanwhile and forced this token
                sequence.own_token_ids[place] = -1 - row
                sequence.length = place + 1
            if sequence not in decoding:
                self.queues.start_decoding(sequence)
        for sequence, _, _, _ in step.scored_rows:
            if sequence.num_uncomputed == 0:
                if (label := sequence.next_label) >= 0:
                    sequence.start_label(label)
                    self.queues.start_decoding(sequence)
                else:
                    step.scored.append(sequence)

    def commit(self, step: Step, token_ids: Iterable[int], follow: Follow) -> list[Sequence]:
        """Appends a step's tokens to their answers, and frees the memory of the answers that end. Steps are committed
        in the order in which they were scheduled. Returns the sequences that are answered now, then those that were
        killed when the step was scheduled.

        Args:
            token_ids: sampled in the rows of `Step.sampled`.
            follow: called in order for each token that becomes part of its answer.
        """
        for each in self._in_flight:  # a later one computes rows of answers that end now
            self._mark_computed(each)
        self._advance(step)
        self._in_flight.remove(step)
        answered: list[Sequence] = []
        for (sequence, place), token in zip(step.sampled, token_ids, strict=True):
            if sequence.finish_reason or not sequence.num_known <= place <= sequence.num_computed:
                continue  # answered already, or the row follows a wrong guess
            followers, reason = follow(sequence, place, token)
            has_late_row, length = sequence.num_computed > place, place + 1 + len(followers)
            if sequence.num_guesses and self._lookup is not None:
                self._lookup.check_guesses(step, sequence, place, (token, *followers), self.pool)
            else:
                sequence.set_token(place, token)
                for follower in followers:
                    sequence.set_token(sequence.length, follower)
            if reason is None and length == len(sequence.own_token_ids):
                reason = "length"
            if reason is not None:
                sequence.length, sequence.has_late_row = length, has_late_row  # later tokens are dropped
                answered.append(sequence)
                self.admission.reserve.book(sequence)
                self.drop(sequence, reason)
        for sequence in step.scored:
            sequence.length = sequence.num_suffix
            answered.append(sequence)
            self.drop(sequence, "scored")
        self.pool.free(step.left_block_ids)
        return [*answered, *step.killed]

    def _add_work(self, step: Step, work: Work, *, may_preempt: bool) -> None:
        if work == "decodes" or (work == "all" and self.queues.mixes_phases):
            self._add_decodes(step, may_preempt=may_preempt)
        if work != "decodes" and not step.is_blocked:
            self.queues.add_prompts(step)
        if work == "all" and not self.queues.mixes_phases and step.is_empty:
            self._add_decodes(step, may_preempt=may_preempt)

    def _add_decodes(self, step: Step, *, may_preempt: bool) -> None:
        """Adds decode tokens, of the request admitted first to the last: one that is preempted for an earlier one is
        not in the step yet. Without `may_preempt`, a request that lacks memory waits, and the step is blocked."""
        block_size, decoding = self.config.block_size, self.queues.decoding
        for sequence in sorted(decoding, key=attrgetter("admission")):
            if step.room == 0:
                break
            if step.num_preempted and sequence not in decoding:
                continue
            num_uncomputed, room = sequence.length - sequence.num_computed, step.room
            num_tokens = num_uncomputed if num_uncomputed < room else room
            needed = sequence.num_computed + num_tokens
            if needed > len(sequence.block_ids) * block_size:
                if not self.admission.can_grow(sequence, needed):
                    if not may_preempt:
                        step.is_blocked = True
                        continue
                    if not make_room(self, sequence, needed, step):
                        break
                sequence.reserve(self.pool, needed)
            if num_tokens:
                step.decodes.append((sequence, num_tokens))
                step.room -= num_tokens

    def drop(self, sequence: Sequence, reason: FinishReason) -> None:
        """Ends a sequence: frees its KV, and the KV of prefixes that no other sequence needs."""
        self.queues.stop(sequence)
        self.num_unfinished -= 1
        sequence.release(self.pool)
        if sequence.node is not None:
            sequence.node.finish_user(self.pool)
        self.pool.forget(sequence)
        sequence.finish_reason = reason
