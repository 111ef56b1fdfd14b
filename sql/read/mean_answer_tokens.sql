-- purpose: mean length of the answers in a workload's table
-- grain:   one row
-- inputs:  the workload's output table
-- identifiers: {table}
-- parameters: none

select avg(num_output_tokens) as mean_tokens, count(num_output_tokens) as num_answers
from {table}
where status = 'ok'
