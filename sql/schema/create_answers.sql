-- purpose: the output table of a workload whose table is not in schema/schema.sql, or of a sample in memory
-- grain:   one row per run and request
-- inputs:  none
-- identifiers: {table}, {keys}, {answers}: the answer's columns, each with its type
-- parameters: none

create table if not exists {table} (
    {keys text},
    {answers},
    status text,
    error text,
    finish_reason text,
    num_prompt_tokens integer,
    num_cached_tokens integer,
    num_output_tokens integer,
    compute_ms double,
    prefix_group bigint,
    model text,
    run_id text,
    created_at timestamptz,
    content_key text
)
