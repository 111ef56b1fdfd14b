-- purpose: which questions a run asked about its rows
-- grain:   one row a list of question numbers
-- inputs:  the run's requests
-- parameters: $requests (path)

select open_questions
from read_parquet($requests)
where error is null
group by open_questions
order by open_questions
