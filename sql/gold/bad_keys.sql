-- purpose: a key with a null part, or of more than one row
-- grain:   at most one row
-- inputs:  batchloom_expected_rows
-- parameters: none

select request_key, count(*) as num_rows
from batchloom_expected_rows
group by request_key
having count(*) > 1 or len(list_filter(request_key, lambda part: part is null)) > 0
order by request_key
limit 1
