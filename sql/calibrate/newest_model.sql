-- purpose: the model of the newest answers that the workload as it is gave
-- grain:   at most one row
-- inputs:  answers, runs
-- parameters: $workload_digest

select runs.model_digest
from answers
inner join runs on runs.run_id = answers.run_id
where runs.workload_digest = $workload_digest and answers.status = 'ok'
order by answers.created_at desc
limit 1
