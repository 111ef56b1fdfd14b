-- purpose: insert the run, with counts of the rows that were written for it
-- grain:   one row
-- inputs:  the workload's output table, steps
-- identifiers: {table}
-- parameters: the columns that are not counted here, by name; $requested_rows (number of requests of the run)

insert into runs by name
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
        coalesce(sum(num_decode_tokens + num_suffix_tokens + num_prefix_tokens), 0)::bigint as num_computed_tokens
    from steps
    where run_id = $run_id
)

select
    $run_id as run_id,
    $workload as workload,
    $status as status,
    nullif($error, '') as error,
    $started_at::timestamptz as started_at,
    $finished_at::timestamptz as finished_at,
    $requested_rows as num_rows,
    answers.num_ok,
    answers.num_errors,
    $requested_rows - answers.num_ok - answers.num_errors as num_unanswered,
    $num_already_done as num_already_done,
    answers.num_prompt_tokens,
    answers.num_cached_tokens,
    answers.num_output_tokens,
    step_totals.num_computed_tokens,
    $token_saving_ratio as token_saving_ratio,
    $best_token_saving_ratio as best_token_saving_ratio,
    (answers.num_prompt_tokens + answers.num_output_tokens) / nullif($infer_seconds, 0.0) as tokens_per_second,
    $read_seconds as read_seconds,
    $tokenize_seconds as tokenize_seconds,
    $plan_seconds as plan_seconds,
    $infer_seconds as infer_seconds,
    $write_seconds as write_seconds,
    step_totals.num_steps,
    $model as model,
    $model_digest as model_digest,
    $workload_digest as workload_digest,
    $shared_with::json as shared_with,
    $config::json as config,
    $versions::json as versions
from answers
cross join step_totals
returning
    run_id,
    workload,
    status,
    num_rows,
    num_ok,
    num_errors,
    num_unanswered,
    num_already_done,
    num_prompt_tokens,
    num_cached_tokens,
    num_output_tokens,
    case when shared_with is null then best_token_saving_ratio end as best_token_saving_ratio,
    coalesce(infer_seconds, 0.0) as infer_seconds
