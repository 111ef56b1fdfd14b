-- purpose: the gold rows, with their keys as text, as in the output table
-- grain:   one row per row of the table
-- inputs:  the table or view $gold, named as in SQL
-- identifiers: {keys}
-- parameters: $gold, $keys

create or replace temp table batchloom_expected_rows as
with ordered as (
    select {keys}, * exclude ({keys})
    from query_table($gold)
),

texts as (
    select decode(encode(columns($keys)::varchar), 'replace') as '\0', * exclude ({keys})
    from ordered
)

select [{keys}] as request_key, * exclude ({keys})
from texts
