-- purpose: the slowest steps of a run
-- grain:   one row per step, slowest first, at most $num_rows
-- inputs:  report_timeline
-- parameters: $num_rows
--
-- started_seconds counts from the first step of the step's engine.

select
    engine,
    partition,
    step,
    engine_started_seconds as started_seconds,
    duration_ms,
    num_decode_tokens,
    num_suffix_tokens,
    num_prefix_tokens,
    num_tokens / nullif(duration_ms / 1000.0, 0.0) as tokens_per_second,
    num_running_requests,
    num_preempted_requests
from report_timeline
order by duration_ms desc, position
limit $num_rows
