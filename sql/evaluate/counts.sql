-- purpose: how many of the compared rows are answered, and the run of the newest answer
-- grain:   one row
-- inputs:  batchloom_expected_rows, batchloom_answers
-- parameters: none

select
    arg_max(answers.run_id, answers.created_at) as run_id,
    count(*) as num_gold_rows,
    count(*) filter (answers.status = 'ok') as num_ok,
    count(*) filter (answers.status = 'error') as num_errors,
    count(*) filter (answers.status is null) as num_unanswered
from batchloom_expected_rows as expected_rows
left join batchloom_answers as answers on answers.request_key = expected_rows.request_key
