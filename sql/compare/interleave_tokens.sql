-- purpose: prompts of two workloads for the same rows as one batch: per row those of the first, then the second
-- grain:   one row per prompt
-- inputs:  tokens artifacts, as files
-- parameters: $first, $second; $num_first, $num_second (prompts of a row)

select
    row_id // $num_first * ($num_first + $num_second) + row_id % $num_first as row_id,
    token_ids,
    error,
    priority
from read_parquet($first)
union all
select
    row_id // $num_second * ($num_first + $num_second) + $num_first + row_id % $num_second,
    token_ids,
    error,
    priority
from read_parquet($second)
order by 1
