"""What one step did: the row that the step log, the report and the throughput figures are made of."""

from dataclasses import dataclass


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
