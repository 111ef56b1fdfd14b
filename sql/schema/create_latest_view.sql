-- purpose: the newest answer to each request that the workload's query still returns; an answer is dropped from the view
--          if its row is gone or has become an error
-- grain:   one row per key
-- inputs:  the workload's output table, and its query as a string literal where <requests> stands; where <keys> stands,
--          the table's keys, each as the query's key casts to text in the reader's time zone; where <rank> stands, the
--          rank among the rows shown, if rows are ranked
-- identifiers: {view}, {table}, {keys}
-- parameters: none

create or replace view {view} as
with batchloom_requests as (  -- first, so that the query cannot see the other CTEs in place of its tables
    select {keys}, error
    from (
        from query(<requests>)
        union all by name
        select null::varchar as error where false
    )
),

newest as (
    select *, [<keys>] as request_key
    from {table}
    qualify row_number() over (
        partition by {keys}
        order by created_at desc, run_id desc, content_key, num_cached_tokens
    ) = 1
),

texts as (
    select
        decode(encode(columns(* exclude (error))::varchar), 'replace'),
        coalesce(ltrim(decode(encode(error::varchar), 'replace')), '') = '' as is_sound
    from batchloom_requests
),

listed as (
    select list_value(*columns(* exclude (is_sound))) as request_key, is_sound
    from texts
)

select newest.* exclude (request_key) <rank>
from newest
where exists (
    select 1
    from listed
    where listed.request_key = newest.request_key
        and (listed.is_sound or newest.status = 'error')
)
