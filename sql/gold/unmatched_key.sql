-- purpose: the first gold key, if there are answers and none of them is to a gold row
-- grain:   at most one row
-- inputs:  batchloom_expected_rows, batchloom_answers
-- parameters: none

select min(expected_rows.request_key) as first_key
from batchloom_expected_rows as expected_rows
left join batchloom_answers as answers on answers.request_key = expected_rows.request_key
having count(answers.request_key) = 0 and exists (select 1 from batchloom_answers)
