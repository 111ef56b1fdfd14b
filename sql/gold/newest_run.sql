-- purpose: the model and adapter of the newest answer; an error only where there is no other answer
-- grain:   at most one row
-- inputs:  the workload's output table, runs
-- identifiers: {table}
-- parameters: $run_id (null for any run)

select runs.model, runs.model_digest, runs.config ->> '$.workload.adapter' as adapter
from {table} as answers
inner join runs on runs.run_id = answers.run_id
where $run_id is null or answers.run_id = $run_id
order by answers.status = 'ok' desc, answers.created_at desc, answers.run_id desc
limit 1
