-- purpose: a table for the answers of one of the workloads, with the columns of its view of newest answers
-- grain:   one row per row of the sample
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
