-- purpose: the checked rows that a step of a cascade answers
-- grain:   one row per chosen row of the workload's query
-- inputs:  batchloom_chosen_rows, the query of checked rows where <checked> stands
-- parameters: those of that query

with checked as (
    <checked>
),

keyed as (
    select *, list_value(*columns('^key_.*$')) as request_key
    from checked
)

select keyed.* exclude (request_key)
from keyed
semi join batchloom_chosen_rows on batchloom_chosen_rows.request_key = keyed.request_key
