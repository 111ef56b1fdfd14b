-- purpose: answers with their keys as a list
-- grain:   one row per key
-- inputs:  the workload's view of newest answers, or its output table for the answers of a run
-- identifiers: {target} (batchloom_answers, or batchloom_expected_rows for the answers of another run), {source}, {keys}
-- parameters: $keys, $run_id (null for all rows), $is_reference (leave out errors)

create or replace temp table {target} as
with ordered as (
    select {keys}, * exclude ({keys})
    from {source}
    where ($run_id is null or run_id = $run_id) and (status = 'ok' or not $is_reference)
    qualify row_number() over (partition by {keys} order by created_at desc, run_id desc, content_key) = 1
),

keyed as (
    select columns($keys)::varchar as 'request_key_\0', *
    from ordered
)

select list_value(*columns('^request_key_.*$')) as request_key, * exclude ({keys}), null::double as no_probability
from keyed
