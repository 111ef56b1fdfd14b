-- purpose: the questions of a run with their answer from the parts, or the reason why there is no prompt
-- grain:   one row per question and row, even if two parts hold it
-- inputs:  view part_rows: the run's finished parts; the run's tokens
-- parameters: $tokens (path)

create or replace temp table batchloom_asked_questions as
select distinct on (row_id) *
from (
    from part_rows
    union all by name
    select row_id, error, 'invalid' as finish_reason
    from read_parquet($tokens)
    where error is not null
)
order by row_id, error is not null, finish_reason
