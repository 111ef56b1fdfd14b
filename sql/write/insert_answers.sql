-- purpose: insert the answers of a run's finished parts
-- grain:   one row per request that a part answers, even if two parts hold it
-- inputs:  the run's artifacts
-- identifiers: {table}, {part_columns}: of the answer in the parts, {types}: the same in the table, with their types
-- parameters: $requests and $parts (paths), $keys, $is_typed (answers are JSON objects), $model, $run_id, $created_at

insert into {table} by name
with requests as (
    select columns($keys), row_id, content_key
    from read_parquet($requests)
),

parts as (
    select distinct on (row_id) *
    from (
        from read_parquet($parts)
        union all by name -- for kinds without a text, and for parts written by an earlier version
        select null::varchar as answer, null::double as compute_ms, null::bigint as prefix_group where false
    )
    order by row_id, error is not null, finish_reason
),

judged as (
    select
        row_id,
        try(
            case when $is_typed then answer::json::struct({types}) else row({part_columns})::struct({types}) end
        ) as given,
        coalesce(
            error, case when given is null then concat('the answer cannot be cast to the columns: ', answer) end
        ) as error,
        finish_reason,
        num_prompt_tokens,
        num_cached_tokens,
        num_output_tokens,
        compute_ms,
        prefix_group
    from parts
)

select
    requests.* exclude (row_id),
    unnest(judged.given),
    judged.* exclude (row_id, given),
    case when judged.error is null then 'ok' else 'error' end as status,
    $model as model,
    $run_id as run_id,
    $created_at as created_at
from requests
inner join judged on judged.row_id = requests.row_id
