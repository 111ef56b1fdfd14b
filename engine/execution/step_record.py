"""Metrics of each step of a run, and the time of each answer. Metrics observe; they change no schedule."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.scheduling.prefix_node import PrefixNode
    from engine.scheduling.scheduler import Scheduler
    from engine.scheduling.sequence import Sequence
    from engine.scheduling.step import Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Counts at the end of one step. Where steps overlap, the next one has been scheduled by then.

    Attributes:
        step: number within the run, from 0.
        num_decode_tokens: rows that continue an answer or a label of several tokens, guesses included. Where steps
            overlap, one more for an answer that ends by an end token or a stop string.
        num_suffix_tokens: rows of prompts' own parts; rows that are recomputed after a preemption count again.
        num_kv_blocks_used: blocks in use while the step is computed.
        num_prefix_kv_blocks, num_request_kv_blocks: of these, held by shared prefixes and by requests' own tokens.
        num_cached_kv_blocks: blocks that are free, but still in the LRU cache (sharing "lru").
        num_running_requests, num_waiting_requests: that hold KV; not started, or preempted.
        num_finished_requests: requests answered in this step, duplicates included.
        duration_ms: wall time of the step, scheduling and sampling included.
        num_padding_tokens: rows of padding, computed and thrown away; not among the tokens above.
        num_swapped_kv_blocks: blocks of preempted requests' KV in host memory after the step.
        num_guessed_tokens, num_right_tokens: of the decode tokens, those that were guessed (`PromptLookup`); of these,
            those that were right.
    """

    step: int
    num_decode_tokens: int = 0
    num_suffix_tokens: int = 0
    num_prefix_tokens: int = 0
    num_kv_blocks_used: int = 0
    num_prefix_kv_blocks: int = 0
    num_request_kv_blocks: int = 0
    num_cached_kv_blocks: int = 0
    num_kv_blocks_total: int = 0
    num_running_requests: int = 0
    num_waiting_requests: int = 0
    num_finished_requests: int = 0
    num_preempted_requests: int = 0
    duration_ms: float
    num_padding_tokens: int = 0
    num_swapped_kv_blocks: int = 0
    num_guessed_tokens: int = 0
    num_right_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_suffix_tokens + self.num_prefix_tokens


def record_step(
    step: "Step", answered: Iterable["Sequence"], scheduler: "Scheduler", *, number: int, duration_ms: float
) -> StepRecord:
    """The record of step `number`, of a model or a simulation, by what its commit returned. See `StepRecord`."""
    return StepRecord(
        step=number,
        num_decode_tokens=sum(count for _, count in step.decodes) + step.num_opening_tokens,
        num_suffix_tokens=sum(count for _, count in step.suffixes) - step.num_opening_tokens,
        num_prefix_tokens=sum(step.prefixes.values()),
        num_kv_blocks_used=step.num_used_blocks,
        num_prefix_kv_blocks=step.num_prefix_blocks,
        num_request_kv_blocks=step.num_used_blocks - step.num_prefix_blocks,
        num_cached_kv_blocks=step.num_cached_blocks,
        num_kv_blocks_total=scheduler.pool.num_blocks,
        num_running_requests=scheduler.queues.num_running,
        num_waiting_requests=scheduler.num_unfinished - scheduler.queues.num_running,
        num_finished_requests=sum(len(found.owners) for found in answered if found.finish_reason != "error"),
        num_preempted_requests=step.num_preempted,
        duration_ms=duration_ms,
        num_padding_tokens=step.num_padding_tokens,
        num_swapped_kv_blocks=0 if scheduler.swap is None else scheduler.swap.num_used,
        num_guessed_tokens=step.num_guessed_tokens,
        num_right_tokens=step.num_right_tokens,
    )


class StepMetrics:
    """Records the steps of a run. A step's time is the time since the step before, so the steps add up to the run."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._unpaid_ms: dict[PrefixNode, float] = {}  # shares of prefixes that no request has yet
        self._num_steps = 0
        self._recorded_at = time.perf_counter()

    def record(self, step: "Step", answered: Iterable["Sequence"]) -> StepRecord:
        """The record of the next step, given the result of its commit."""
        now = time.perf_counter()
        duration_ms = (now - self._recorded_at) * 1e3
        self._recorded_at = now
        self.share_time(step, duration_ms)
        record = record_step(step, answered, self._scheduler, number=self._num_steps, duration_ms=duration_ms)
        self._num_steps += 1
        return record

    def share_time(self, step: "Step", duration_ms: float) -> None:
        """Divides the step's time among its sequences (`Sequence.compute_ms`), by the tokens computed for each.

        A prefix's share goes to the first request with tokens in a step after it, which is also the one charged with
        its tokens (`Sequence.num_charged`); so does the share of a prefix that was freed and computed again.
        """
        work, unpaid_ms = (*step.decodes, *step.suffixes), self._unpaid_ms
        ms_per_token = duration_ms / (sum(count for _, count in work) + sum(step.prefixes.values()))
        for node, count in step.prefixes.items():
            unpaid_ms[node] = unpaid_ms.get(node, 0.0) + count * ms_per_token
        for sequence, count in work:
            sequence.compute_ms += count * ms_per_token
        for lowest, members in step.members.items() if unpaid_ms else ():
            if lowest is not None:  # decodes, too: a swapped-in sequence may meet a recomputed prefix
                members[0][0].compute_ms += sum(unpaid_ms.pop(node, 0.0) for node in lowest.chain())
