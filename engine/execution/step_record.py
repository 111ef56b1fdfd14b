"""What one step did: the row that the step log, the report and the throughput figures are made of."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.scheduling.scheduler import Scheduler
    from engine.scheduling.step import Answered, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Counts at the end of one step; where steps overlap, once the next one has been scheduled.

    Attributes:
        step: number within the run, from 0.
        num_decode_tokens: rows that continued an answer (or a label of several tokens); where steps overlap, one more
            for an answer that ends by an end token or a stop string.
        num_suffix_tokens: rows of prompts' own parts; recomputed ones after a preemption count again.
        num_prefix_tokens: rows of shared prefixes.
        num_kv_blocks_used: blocks held when the step's memory was at its highest.
        num_prefix_kv_blocks: of these, held by shared prefixes.
        num_request_kv_blocks: of these, held by requests' own tokens.
        num_cached_kv_blocks: beyond these, kept by the LRU cache (sharing "lru") until others need them.
        num_kv_blocks_total: the block pool's size.
        num_running_requests: requests that hold KV.
        num_waiting_requests: requests not started, or preempted.
        num_finished_requests: requests answered in this step, duplicates included.
        num_preempted_requests: requests that lost their KV in this step.
        duration_ms: wall time of the step, scheduling and sampling included.
        num_padding_tokens: rows computed and thrown away, of prompts padded to one length; not among the tokens above.
        num_swapped_kv_blocks: blocks in host memory, after the step, that hold the KV of preempted requests.
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
        num_swapped_kv_blocks=scheduler.num_swapped_blocks,
    )
