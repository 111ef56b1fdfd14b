"""What each step of a run did, and what each answer cost. Metrics observe: they change nothing."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.scheduling.prefix_node import PrefixNode
    from engine.scheduling.scheduler import Scheduler
    from engine.scheduling.step import Answered, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Counts at the end of one step; where steps overlap, once the next one has been scheduled.

    Attributes:
        step: number within the run, from 0.
        num_decode_tokens: rows that continued an answer (or a label of several tokens), guesses included; where steps
            overlap, one more for an answer that ends by an end token or a stop string.
        num_suffix_tokens: rows of prompts' own parts; recomputed ones after a preemption count again.
        num_prefix_tokens: rows of shared prefixes.
        num_kv_blocks_used: blocks held when the step's memory was at its highest.
        num_prefix_kv_blocks, num_request_kv_blocks: of these, held by shared prefixes and by requests' own tokens.
        num_cached_kv_blocks: beyond these, kept by the LRU cache (sharing "lru") until others need them.
        num_kv_blocks_total: the block pool's size.
        num_running_requests: requests that hold KV.
        num_waiting_requests: requests not started, or preempted.
        num_finished_requests: requests answered in this step, duplicates included.
        num_preempted_requests: requests that lost their KV in this step.
        duration_ms: wall time of the step, scheduling and sampling included.
        num_padding_tokens: rows computed and thrown away, of prompts padded to one length; not among the tokens above.
        num_swapped_kv_blocks: blocks in host memory, after the step, that hold the KV of preempted requests.
        num_guessed_tokens, num_right_tokens: of the decode tokens, those that were guessed (`PromptLookup`); of these,
            those that the answers went on with.
    """

    step: int
    num_decode_tokens: int
    num_suffix_tokens: int
    num_prefix_tokens: int
    num_kv_blocks_used: int
    num_prefix_kv_blocks: int
    num_request_kv_blocks: int
    num_cached_kv_blocks: int
    num_kv_blocks_total: int
    num_running_requests: int
    num_waiting_requests: int
    num_finished_requests: int
    num_preempted_requests: int
    duration_ms: float
    num_padding_tokens: int = 0
    num_swapped_kv_blocks: int = 0
    num_guessed_tokens: int = 0
    num_right_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decode_tokens + self.num_suffix_tokens + self.num_prefix_tokens


def record_step(
    step: "Step", answered: Iterable["Answered"], scheduler: "Scheduler", *, number: int, duration_ms: float
) -> StepRecord:
    """The record of a step that is committed, whether a model computed it or a simulation.

    Args:
        step: what was computed.
        answered: what the commit returned.
        scheduler: as it is after the commit.
        number: of the step within the run, from 0.
        duration_ms: time of the step.
    """
    return StepRecord(
        step=number,
        num_decode_tokens=sum(count for _, count in step.decodes),
        num_suffix_tokens=sum(count for _, count in step.suffixes),
        num_prefix_tokens=sum(step.prefixes.values()),
        num_kv_blocks_used=step.num_used_blocks,
        num_prefix_kv_blocks=step.num_prefix_blocks,
        num_request_kv_blocks=step.num_used_blocks - step.num_prefix_blocks,
        num_cached_kv_blocks=step.num_cached_blocks,
        num_kv_blocks_total=scheduler.pool.num_blocks,
        num_running_requests=scheduler.num_running,
        num_waiting_requests=scheduler.num_unfinished - scheduler.num_running,
        num_finished_requests=sum(len(found.sequence.owners) for found in answered if found.reason != "error"),
        num_preempted_requests=step.num_preempted,
        duration_ms=duration_ms,
        num_padding_tokens=step.num_padding_tokens,
        num_swapped_kv_blocks=0 if scheduler.swap is None else scheduler.swap.num_used,
        num_guessed_tokens=step.num_guessed_tokens,
        num_right_tokens=step.num_right_tokens,
    )


class StepMetrics:
    """Records one step after the other. A step's time is that since the step before, so steps add up to the run; its
    sequences are charged with it (`Sequence.compute_ms`)."""

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._unpaid_ms: dict[PrefixNode, float] = {}
        self._num_steps = 0
        self._recorded_at = time.perf_counter()

    def record(self, step: "Step", answered: Iterable["Answered"]) -> StepRecord:
        """The record of the next step, given what its commit returned."""
        now = time.perf_counter()
        duration_ms = (now - self._recorded_at) * 1e3
        share_time(step, duration_ms, self._unpaid_ms)
        record = record_step(step, answered, self._scheduler, number=self._num_steps, duration_ms=duration_ms)
        self._recorded_at = now
        self._num_steps += 1
        return record


def share_time(step: "Step", duration_ms: float, unpaid_ms: dict["PrefixNode", float]) -> None:
    """Divides the time of a step that is done among its sequences, in proportion to the tokens computed for each.

    A prefix's share waits for the first request that runs on it, which is the one that is charged with its tokens
    (`Sequence.num_charged`); so does the share of a prefix that was freed and computed again.

    Args:
        step: not booked yet.
        duration_ms: time of the step.
        unpaid_ms: shares of prefixes that wait; changed here.
    """
    work = (*step.decodes, *step.suffixes)
    ms_per_token = duration_ms / (sum(count for _, count in work) + sum(step.prefixes.values()))
    for node, count in step.prefixes.items():
        unpaid_ms[node] = unpaid_ms.get(node, 0.0) + count * ms_per_token
    for sequence, count in work:
        sequence.compute_ms += count * ms_per_token
        if unpaid_ms and sequence.node is not None:  # of a decode, too: one swapped out may meet a prefix made again
            sequence.compute_ms += sum(unpaid_ms.pop(node, 0.0) for node in sequence.node.chain())
