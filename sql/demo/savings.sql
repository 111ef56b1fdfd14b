-- purpose: answers and saved tokens of each workload's newest run that had rows
-- grain:   one row per workload
-- inputs:  run_summary
-- parameters: none

with runs_with_work as (
    select
        run_id, workload, started_at, num_ok, num_prompt_tokens, num_saved_tokens, saved_percent, best_saved_percent,
        total_seconds
    from run_summary
    where num_rows > 0
    qualify row_number() over (partition by workload order by started_at desc, run_id desc) = 1
)

select workload, num_ok, num_prompt_tokens, num_saved_tokens, saved_percent, best_saved_percent, total_seconds
from runs_with_work
order by started_at, run_id
