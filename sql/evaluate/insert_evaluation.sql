-- purpose: store an evaluation with its counts
-- grain:   one row
-- inputs:  batchloom_expected_rows, batchloom_answers
-- parameters: $evaluation_id, $workload, $gold, $answers, $against, $created_at

insert into evaluations by name
select
    $evaluation_id as evaluation_id,
    $workload as workload,
    $gold as gold,
    $answers as answers,
    $against as against,
    arg_max(answers.run_id, answers.created_at) as run_id,
    $created_at::timestamptz as created_at,
    count(*) as num_gold_rows,
    count(*) filter (answers.status = 'ok') as num_ok,
    count(*) filter (answers.status = 'error') as num_errors,
    count(*) filter (answers.status is null) as num_unanswered
from batchloom_expected_rows as expected_rows
left join batchloom_answers as answers on answers.request_key = expected_rows.request_key
returning run_id, num_gold_rows, num_ok, num_errors, num_unanswered
