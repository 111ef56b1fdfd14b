-- purpose: number of gold rows with an answer, and the first gold key
-- grain:   one row
-- inputs:  expected_rows, answers
-- parameters: none

select min(expected_rows.request_key) as first_key, count(answers.request_key) as num_matches
from expected_rows
left join answers on answers.request_key = expected_rows.request_key
