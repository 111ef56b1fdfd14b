-- purpose: the distinct lists of questions that a run asked about its rows
-- grain:   one row per list of question numbers
-- inputs:  the run's requests
-- parameters: $requests (path)

select open_questions
from read_parquet($requests)
where error is null
group by open_questions
order by open_questions
