-- purpose: what was written for a run: answers and errors, their tokens, steps and the end of the last one
-- grain:   one row
-- inputs:  the workload's output table, steps
-- identifiers: {table}
-- parameters: $run_id

with answers as (
    select
        count(*) filter (where status = 'ok') as num_ok,
        count(*) filter (where status = 'error') as num_errors,
        coalesce(sum(num_prompt_tokens), 0)::bigint as num_prompt_tokens,
        coalesce(sum(num_cached_tokens), 0)::bigint as num_cached_tokens,
        coalesce(sum(num_output_tokens), 0)::bigint as num_output_tokens
    from {table}
    where run_id = $run_id
),

step_totals as (
    select
        count(*) as num_steps,
        coalesce(sum(num_decode_tokens + num_suffix_tokens + num_prefix_tokens), 0)::bigint as num_computed_tokens,
        max(started_at + to_microseconds((duration_ms * 1000)::bigint)) as last_step_at
    from steps
    where run_id = $run_id
)

select *
from answers
cross join step_totals
