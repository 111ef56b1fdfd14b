-- purpose: what is answered already: the content keys that the newest run of each row settled. A row with
--          finish_reason 'error' is tried again
-- grain:   one row per request key and content key
-- inputs:  the workload's output table
-- identifiers: {table}, {keys}
-- parameters: none

create or replace temp table batchloom_newest_answers as
with answers as (
    select [{keys}] as request_key, content_key, status, finish_reason, created_at, run_id
    from {table}
),

newest as (
    select request_key, content_key, status, finish_reason
    from answers
    qualify rank() over (partition by request_key order by created_at desc, run_id desc) = 1
)

select distinct request_key, content_key, null::varchar[] as settled
from newest
where status = 'ok' or finish_reason = 'invalid'
