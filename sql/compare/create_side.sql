-- purpose: what one of the workloads answered, as its view of newest answers would have it
-- grain:   one row a row of the sample
-- inputs:  none
-- identifiers: {table}, {keys}, {answers}: the answer's columns, each with its type
-- parameters: none

create or replace table {table} (
    {keys text},
    {answers},
    status text,
    error text,
    run_id text,
    created_at timestamptz,
    content_key text
)
