-- purpose: the first model's confidence in its answer to each row of the workload's query; the lowest one of several
--          questions counts
-- grain:   one row per key that has an answer of the first model
-- inputs:  batchloom_first_answers, macro confidence_of
-- identifiers: {keys}
-- parameters: $requests_sql (the workload's query), $probabilities (columns), $answers (columns)

create or replace temp table batchloom_confidences as
with requests as (  -- first, so that the query cannot see the other CTEs in place of its tables
    select {keys}
    from query($requests_sql)
),

texts as (
    select decode(encode(columns(*)::varchar), 'replace')
    from requests
),

requested as (
    select distinct list_value(*columns(*)) as request_key
    from texts
),

measured as (
    select
        [{keys}] as request_key,
        status,
        confidence_of(columns($probabilities)) as 'confidence_\0',
        (columns($answers))::varchar as 'answer_\0'
    from batchloom_first_answers
),

listed as (
    select
        request_key,
        status = 'ok' as is_ok,
        list_min(list_value(*columns('^confidence_.*$'))) as confidence,
        list_value(*columns('^answer_.*$')) as answers
    from measured
)

select
    listed.request_key,
    bool_and(listed.is_ok and listed.confidence is not null) as is_ok,
    min(listed.confidence) as confidence,
    any_value(listed.answers) as answers
from listed
inner join requested on requested.request_key = listed.request_key
group by listed.request_key
