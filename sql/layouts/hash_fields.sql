-- purpose: hash and size of each text of a workload's rows, to find equal texts and their lengths
-- grain:   one row per row of requests without an error, in their order
-- inputs:  requests artifact, as a file
-- parameters: $requests, $fields

select
    hash(coalesce(columns($fields), '')) as 'hash_\0',
    strlen(coalesce(columns($fields), '')) as 'size_\0'
from read_parquet($requests)
where error is null
