-- purpose: what is answered already: the content keys of each row's newest run, their number, and whether it settled
--          them. A row with finish_reason 'error' is tried again; an error row with 'length' would only be cut again
-- grain:   one row per request key and content key
-- inputs:  the workload's output table
-- identifiers: {table}, {keys}
-- parameters: none

create or replace temp table batchloom_newest_answers as
with newest as (
    select [{keys}] as request_key, content_key, status, finish_reason
    from {table}
    qualify rank() over (partition by {keys} order by created_at desc, run_id desc) = 1
)

select
    request_key,
    content_key,
    count(*) over (partition by request_key) as num_contents,
    bool_or(status = 'ok' or finish_reason in ('invalid', 'length')) as is_settled,
    null::varchar[] as settled
from newest
group by request_key, content_key
