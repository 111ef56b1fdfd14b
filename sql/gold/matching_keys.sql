-- purpose: number of gold rows with an answer, and the first gold key
-- grain:   one row
-- inputs:  batchloom_expected_rows, batchloom_answers
-- parameters: none

select min(expected_rows.request_key) as first_key, count(answers.request_key) as num_matches
from batchloom_expected_rows as expected_rows
left join batchloom_answers as answers on answers.request_key = expected_rows.request_key
