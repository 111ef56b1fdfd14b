-- purpose: the gold rows, with their keys as text, as in the output table
-- grain:   one row per row of the table
-- inputs:  the table of gold rows
-- identifiers: {source}, {keys}
-- parameters: $keys

create or replace temp table expected_rows as
with ordered as (
    select {keys}, * exclude ({keys})
    from {source}
),

keyed as (
    select decode(encode(columns($keys)::varchar), 'replace') as 'request_key_\0', *
    from ordered
)

select list_value(*columns('^request_key_.*$')) as request_key, * exclude ({keys})
from keyed
