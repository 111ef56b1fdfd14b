-- purpose: histogram of the share of each prompt that another row had computed
-- grain:   one row per tenth of the prompt, 0 to 9; the last includes wholly cached prompts
-- inputs:  the workload's output table
-- identifiers: {table}
-- parameters: $run_id

with rows_by_tenth as (
    select least(num_cached_tokens * 10 // num_prompt_tokens, 9)::bigint as tenth, count(*) as num_rows
    from {table}
    where run_id = $run_id and status = 'ok' and num_prompt_tokens > 0
    group by all
),

tenths as (
    select unnest(range(10)) as tenth
)

select tenths.tenth, coalesce(rows_by_tenth.num_rows, 0) as num_rows
from tenths
left join rows_by_tenth on rows_by_tenth.tenth = tenths.tenth
order by tenths.tenth
