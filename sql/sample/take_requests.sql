-- purpose: the chosen requests, with row_id from 0 in the same order
-- grain:   one row per chosen row
-- inputs:  a requests artifact, as a file
-- parameters: $requests, $row_ids

select * replace (row_number() over (order by row_id) - 1 as row_id)
from read_parquet($requests)
where list_contains($row_ids, row_id)
order by row_id
