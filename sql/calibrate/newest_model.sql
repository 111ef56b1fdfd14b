-- purpose: the model of the newest answers to the workload in its present form
-- grain:   at most one row
-- inputs:  batchloom_answers, runs
-- parameters: $workload_digest

select runs.model_digest
from batchloom_answers as answers
inner join runs on runs.run_id = answers.run_id
where runs.workload_digest = $workload_digest and answers.status = 'ok'
order by answers.created_at desc
limit 1
