"""What is known of a run: one dataclass a ``sql/report/``, its fields the columns of that statement."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """``report/run.sql``: the run as a whole; None is what it did not come to know."""

    run_id: str
    workload: str
    status: str
    error: str | None
    started_at_utc: str
    total_seconds: float
    num_rows: int
    num_ok: int
    num_errors: int
    num_unanswered: int
    num_already_done: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_computed_tokens: int
    token_saving_ratio: float | None
    best_token_saving_ratio: float | None
    tokens_per_second: float | None
    read_seconds: float | None
    tokenize_seconds: float | None
    plan_seconds: float | None
    infer_seconds: float | None
    write_seconds: float | None
    num_steps: int
    model: str
    config: str | None
    versions: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTotals:
    """``report/step_totals.sql``: all steps summed up; None where there was no step.

    Attributes:
        num_padding_tokens: computed beside the three kinds above.
        step_seconds: of all engines together.
        elapsed_seconds: of the engine that took longest; so tecd_seconds.
        tecd_seconds: time of all steps but those of the run's cool-down; so for num_tecd_steps, tecd_utilisation.
        partition_cool_down_seconds: time in the cool-down of any partition.
        utilisation: mean of the steps' tokens over the chunk size, 0 to 1.
        num_valley_steps: steps less than half full, outside any cool-down.
    """

    num_steps: int
    num_partitions: int
    num_engines: int
    max_num_batched_tokens: int | None
    num_decode_tokens: int
    num_suffix_tokens: int
    num_prefix_tokens: int
    num_padding_tokens: int
    step_seconds: float
    elapsed_seconds: float
    tecd_seconds: float
    num_tecd_steps: int
    partition_cool_down_seconds: float
    utilisation: float | None
    tecd_utilisation: float | None
    num_valley_steps: int
    valley_seconds: float
    peak_kv_blocks: int | None
    num_kv_blocks_total: int | None
    peak_swapped_kv_blocks: int
    peak_running_requests: int | None
    num_preempted_requests: int
    num_preempting_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBin:
    """``report/step_bins.sql``: neighbouring steps as one place of a picture.

    Attributes:
        prefix_kv_blocks_at_max: of the step with the most KV blocks, those that prefixes hold; None where the run did
            not note them. So request_kv_blocks_at_max (requests' own tokens) and cached_kv_blocks_at_max (what the LRU
            cache keeps beyond these).
        max_held_kv_blocks: the most, with what is cached.
        max_rows: the most tokens, with the padding.
        max_swapped_kv_blocks: the most in host memory.
    """

    first_position: int
    last_position: int
    engine: int
    first_partition: int
    last_partition: int
    started_seconds: float
    ended_seconds: float
    mean_decode_tokens: float
    mean_suffix_tokens: float
    mean_prefix_tokens: float
    mean_padding_tokens: float
    min_tokens: int
    max_tokens: int
    max_rows: int
    mean_kv_blocks: float
    min_kv_blocks: int
    max_kv_blocks: int
    prefix_kv_blocks_at_max: int | None
    request_kv_blocks_at_max: int | None
    cached_kv_blocks_at_max: int | None
    max_held_kv_blocks: int | None
    max_swapped_kv_blocks: int
    mean_running_requests: float
    min_running_requests: int
    max_running_requests: int
    mean_waiting_requests: float
    min_waiting_requests: int
    max_waiting_requests: int
    num_preempted_requests: int
    is_cool_down: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UtilisationBin:
    """``report/utilisation.sql``: the steps that were from tenth/10 to (tenth + 1)/10 full."""

    tenth: int
    num_steps: int
    seconds: float
    cool_down_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """``report/engines.sql``: what one of the engines did; seconds are of its steps."""

    engine: int
    worker: str
    num_partitions: int
    num_steps: int
    num_tokens: int
    seconds: float
    tecd_seconds: float
    utilisation: float
    peak_kv_blocks: int
    num_kv_blocks_total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionRow:
    """``report/slowest_partitions.sql``"""

    partition: int
    num_steps: int
    seconds: float
    cool_down_seconds: float
    num_tokens: int
    tokens_per_second: float | None
    utilisation: float
    peak_kv_blocks: int
    num_finished_requests: int
    num_preempted_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowStep:
    """``report/slowest_steps.sql``; started_seconds counts from its engine's first step."""

    engine: int
    partition: int
    step: int
    started_seconds: float
    duration_ms: float
    num_decode_tokens: int
    num_suffix_tokens: int
    num_prefix_tokens: int
    tokens_per_second: float | None
    num_running_requests: int
    num_preempted_requests: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowGroup:
    """``report/slowest_groups.sql``: a prefix group and the parts of the steps' time that its rows cost.

    Attributes:
        num_groups: of the whole run.
        share_degree: distinct prompts; None where the plan is no longer there; so num_prefix_tokens.
        num_computed_prompt_tokens: of num_prompt_tokens, not found computed by another row.
        dearest_key: of the row that cost most: the one that is charged with the prefix, where it is long.
    """

    prefix_group: int
    num_groups: int
    seconds: float
    share_of_time: float | None
    share_degree: int | None
    num_prefix_tokens: int | None
    num_rows: int
    num_prompt_tokens: int
    num_computed_prompt_tokens: int
    num_output_tokens: int
    dearest_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBin:
    """``report/lengths.sql`` and, of kind "prefix", ``report/prefix_lengths.sql``: so many from low to below high."""

    kind: str
    low: int
    high: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedShareBin:
    """``report/cached_shares.sql``: rows of which tenth/10 to (tenth + 1)/10 was computed for another row."""

    tenth: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareDegreeBin:
    """``report/share_degrees.sql``: groups of which low to high distinct prompts share the prefix."""

    low: int
    high: int
    num_groups: int
    num_prompts: int
    num_rows: int
    num_prefix_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReason:
    """``report/errors.sql``"""

    reason: str
    finish_reason: str
    num_rows: int
    example: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that a page shows of one run.

    Attributes:
        slow_groups: empty where the run did not note what an answer cost.
        lengths: of prompts, computed parts and answers; so `cached_shares`: empty where no row was answered.
        share_degrees, prefix_lengths: empty where the plan is no longer there.
        config, versions: as the run noted them.
        prediction: quantity (`num_steps`, `num_computed_tokens`, `peak_kv_blocks`, `step_seconds`, `elapsed_seconds`,
            `tecd_seconds`) to value, where the run's config holds one under "prediction"; else empty.
    """

    run: RunRow
    totals: StepTotals
    bins: Sequence[StepBin] = ()
    utilisation: Sequence[UtilisationBin] = ()
    engines: Sequence[EngineRow] = ()
    partitions: Sequence[PartitionRow] = ()
    slow_steps: Sequence[SlowStep] = ()
    slow_groups: Sequence[SlowGroup] = ()
    lengths: Sequence[LengthBin] = ()
    cached_shares: Sequence[CachedShareBin] = ()
    share_degrees: Sequence[ShareDegreeBin] = ()
    prefix_lengths: Sequence[LengthBin] = ()
    errors: Sequence[ErrorReason] = ()
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    prediction: Mapping[str, float]
