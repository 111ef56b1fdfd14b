-- purpose: answers with their keys as a list
-- grain:   one row per key
-- inputs:  the workload's view of newest answers, or its output table for the answers of a run
-- identifiers: {target} (batchloom_answers, or batchloom_expected_rows for the answers of another run), {source}, {keys}
-- parameters: $run_id (null for all rows), $leaves_out_errors

create or replace temp table {target} as
select [{keys}] as request_key, * exclude ({keys}), null::double as batchloom_no_probability
from (
    from {source}
    union all by name -- of workloads that ask a row several questions
    select null::map(varchar, struct(digest varchar, finish_reason varchar, error varchar)) as question_states
    where false
)
where ($run_id is null or run_id = $run_id) and (status = 'ok' or not $leaves_out_errors)
qualify row_number() over (partition by {keys} order by created_at desc, run_id desc, content_key) = 1
