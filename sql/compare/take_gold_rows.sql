-- purpose: the requests for rows that gold judges, with the same row_id
-- grain:   one row per row of the workload with a gold row
-- inputs:  a requests artifact, as a file
-- identifiers: {keys}
-- parameters: $requests, $gold_keys

select *
from read_parquet($requests)
where [{keys}] in (select unnest($gold_keys::varchar[][]))
order by row_id
