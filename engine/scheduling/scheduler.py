"""Which tokens each step computes, and what its results do to the requests (BatchLLM 4.3.1 to 4.3.3).

Decode tokens come first, then suffixes of requests whose prefix is ready, then the prefixes of the next groups. When
answers outgrow the memory set aside for them, the request that was admitted last is preempted.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequences
from operator import attrgetter
from typing import TYPE_CHECKING

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

Follow = Callable[[Sequence, int, int], tuple[Sequences[int], FinishReason | None]]
"""Given a sequence, the index of an own token and that token, returns the forced tokens that follow it, as many as the
answer has room for, and why the answer ends with them, unless by its length."""


class Scheduler:
    """State of one run. `schedule` chooses a step's tokens and allocates their KV, `commit` applies its results.

    A driver that overlaps steps calls the first two parts of `commit` earlier: `mark_computed` once the step is
    launched, `advance` so that the next step can be scheduled before the tokens of this one are known.

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

    @property
    def num_unfinished(self) -> int:
        """Sequences not answered yet, running or not."""
        return self.queues.num_unfinished

    def schedule(self, *, may_preempt: bool = True) -> Step:
        """The next step, with KV memory for all that it computes. Empty when every request is answered.

        `may_preempt` is False while an earlier step is not committed, whose KV is still being written. The step is then
        empty where a request would have to be preempted, or where all work depends on that commit.
        """
        step = self.new_step()
        if self.num_unfinished:
            self._add_work(step, may_preempt=may_preempt)
            if step.is_blocked:
                step = self.new_step()
            elif may_preempt and step.is_empty:
                evict_idle_prefixes(self)
                self._add_work(step, may_preempt=True)
            assert not (step.is_empty and may_preempt), "requests are left, but none of them could be given memory"
        return self.finalize(step)

    def mark_computed(self, step: Step) -> None:
        """Counts the step's KV as written. True for later steps as soon as the step is launched: they run in order."""
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

    def advance(self, step: Step) -> None:
        """Appends an unknown token to each answer of the step, and starts the next label of each scored request.

        An unknown token is the negative id -1 - row (`TokenBatch`). Answers that have reached their longest length get
        none, and neither do answers with guessed tokens, until it is known which guesses are right.
        """
        if not step.is_computed:
            self.mark_computed(step)
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
        if not step.is_advanced:
            self.advance(step)
        answered: list[Sequence] = []
        for (sequence, place), token in zip(step.sampled, token_ids, strict=True):
            if sequence.finish_reason or not sequence.num_known <= place <= sequence.num_computed:
                continue  # answered already, or the row follows a wrong guess
            followers, reason = follow(sequence, place, token)
            has_late_row, length = sequence.num_computed > place, place + 1 + len(followers)
            if sequence.num_guesses:
                self._check_guess(step, sequence, place, token)
            else:
                sequence.set_token(place, token)
            for follower in followers:
                self._check_guess(step, sequence, sequence.length, follower)
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

    def _check_guess(self, step: Step, sequence: Sequence, place: int, token_id: int) -> None:
        """Sets own token `place`. Where it was guessed right, the step has written its KV already."""
        was_guessed, is_right = sequence.num_guesses > 0, sequence.set_token(place, token_id)
        if was_guessed and self._lookup is not None:
            self._lookup.book(place - sequence.ending_start, is_right=is_right)
            step.num_right_tokens += is_right
        if is_right:
            sequence.num_computed += 1
            self.pool.remember(sequence, sequence.num_computed - 1)

    def new_step(self) -> Step:
        """An empty step."""
        return Step(block_size=self.config.block_size, room=self.config.step_tokens)

    def finalize(self, step: Step) -> Step:
        """Adds guessed tokens to the step and arranges its rows; returns the step."""
        if self._lookup is not None:
            self._lookup.add_guesses(step)
        step.finalize(self.pool)
        return step

    def _add_work(self, step: Step, *, may_preempt: bool) -> None:
        if self.queues.mixes_phases:
            self.add_decodes(step, may_preempt=may_preempt)
            if not step.is_blocked:
                self.queues.add_prompts(step)
        else:
            self.queues.add_prompts(step)
            if step.is_empty:
                self.add_decodes(step, may_preempt=may_preempt)

    def add_decodes(self, step: Step, *, may_preempt: bool) -> None:
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
        self.queues.num_unfinished -= 1
        sequence.release(self.pool)
        if sequence.node is not None:
            sequence.node.finish_user(self.pool)
        self.pool.forget(sequence)
        sequence.finish_reason = reason
