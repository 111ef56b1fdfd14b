-- purpose: prompts of two workloads for the same rows as one batch: row n of the first is row 2n, of the second 2n + 1
-- grain:   one row a row and workload
-- inputs:  tokens artifacts, as files
-- parameters: $first, $second

select 2 * row_id as row_id, token_ids, error, priority
from read_parquet($first)
union all
select 2 * row_id + 1, token_ids, error, priority
from read_parquet($second)
order by 1
