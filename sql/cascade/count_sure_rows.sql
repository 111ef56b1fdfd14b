-- purpose: number of rows that the sample was drawn from
-- grain:   one row
-- inputs:  batchloom_confidences
-- parameters: none

select count(*) as num_rows
from batchloom_confidences
where is_ok
