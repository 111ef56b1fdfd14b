-- purpose: what is needed of the texts of a workload's rows to find out which ones are equal, and how long they are
-- grain:   one row a row of requests without an error, in their order
-- inputs:  requests artifact, as a file
-- parameters: $requests, $fields

select
    hash(coalesce(columns($fields), '')) as 'hash_\0',
    strlen(coalesce(columns($fields), '')) as 'size_\0'
from read_parquet($requests)
where error is null
