-- purpose: insert the answers of a run's finished parts
-- grain:   one row per request that a part answers, even if two parts hold it
-- inputs:  the run's artifacts
-- identifiers: {table}, {columns}: of the answer in the table, {part_columns}: the same in the parts
-- parameters: $requests and $parts (paths), $keys, $model, $run_id, $created_at

insert into {table} by name
with requests as (
    select columns($keys), row_id, content_key
    from read_parquet($requests)
),

parts ({columns}) as (  -- names of the first columns
    select distinct on (row_id)
        {part_columns},
        row_id,
        error,
        finish_reason,
        num_prompt_tokens,
        num_cached_tokens,
        num_output_tokens,
        compute_ms,
        prefix_group
    from (
        from read_parquet($parts)
        union all by name -- for parts written by an earlier version
        select null::double as compute_ms, null::bigint as prefix_group where false
    )
    order by row_id, error is not null, finish_reason
)

select
    requests.* exclude (row_id),
    parts.* exclude (row_id),
    case when parts.error is null then 'ok' else 'error' end as status,
    $model as model,
    $run_id as run_id,
    $created_at as created_at
from requests
inner join parts on parts.row_id = requests.row_id
