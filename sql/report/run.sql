-- purpose: the totals of a run, for its report
-- grain:   at most one row: the run, or if $run_id is null the newest one that had something to do, else the newest
-- inputs:  runs
-- parameters: $run_id (text or null)

select
    run_id,
    workload,
    status,
    error,
    strftime(started_at at time zone 'UTC', '%Y-%m-%d %H:%M:%S') as started_at_utc,
    epoch(finished_at - started_at) as total_seconds,
    num_rows,
    num_ok,
    num_errors,
    num_unanswered,
    num_already_done,
    num_prompt_tokens,
    num_cached_tokens,
    num_output_tokens,
    num_computed_tokens,
    to_json(runs) ->> 'shared_with' is not null as is_shared,  -- a table of an older version lacks the column
    case when not is_shared then token_saving_ratio end as token_saving_ratio,
    case when not is_shared then best_token_saving_ratio end as best_token_saving_ratio,
    tokens_per_second,
    read_seconds,
    tokenize_seconds,
    plan_seconds,
    infer_seconds,
    write_seconds,
    num_steps,
    model,
    config::text as config,
    versions::text as versions
from runs
where $run_id is null or run_id = $run_id
order by num_rows = 0 and status = 'completed', started_at desc, run_id desc
limit 1
