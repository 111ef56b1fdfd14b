-- purpose: the models of the newest answers to the workload in its present form, several after a cascade
-- grain:   one row per model, that of most answers first
-- inputs:  batchloom_answers, runs
-- parameters: $workload_digest

select arg_max(runs.model, answers.created_at) as model, runs.model_digest
from batchloom_answers as answers
inner join runs on runs.run_id = answers.run_id
where runs.workload_digest = $workload_digest
group by runs.model_digest
order by count(*) desc, runs.model_digest
