-- purpose: mean length of the answers of a workload's newest runs, as many as have 1,000 answers together, or without
--          any, of all answers in its table
-- grain:   one row
-- inputs:  the workload's output table, runs
-- identifiers: {table}
-- parameters: $digest (of the workload)

with newest as (
    select run_id
    from runs
    where workload_digest = $digest and num_ok > 0
    qualify sum(num_ok) over (order by started_at desc, run_id) - num_ok < 1000
),

answers as (
    select num_output_tokens, run_id in (select run_id from newest) as is_newest
    from {table}
    where (status = 'ok' or finish_reason = 'length') and num_output_tokens is not null -- a cut answer was decoded, too
)

select
    coalesce(avg(num_output_tokens) filter (is_newest), avg(num_output_tokens)) as mean_tokens,
    coalesce(nullif(count(*) filter (is_newest), 0), count(*)) as num_answers
from answers
