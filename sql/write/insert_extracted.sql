-- purpose: insert the typed columns of a run's finished parts, mode "extract"
-- grain:   one row per request that a part answers, even if two parts hold it
-- inputs:  the run's artifacts
-- identifiers: {table}, {types}: the columns of the answer with their types
-- parameters: $requests and $parts (paths), $keys, $model, $run_id, $created_at

insert into {table} by name
with requests as (
    select columns($keys), row_id, content_key
    from read_parquet($requests)
),

parts as (
    select distinct on (row_id)
        row_id,
        answer,
        try(cast(cast(answer as json) as struct({types}))) as extracted,
        error,
        finish_reason,
        num_prompt_tokens,
        num_cached_tokens,
        num_output_tokens,
        compute_ms,
        prefix_group
    from read_parquet($parts)
    order by row_id, error is not null, finish_reason
),

judged as (
    select
        * replace (
            case
                when error is null and extracted is null then 'the answer cannot be cast to the columns: ' || answer
                else error
            end as error
        )
    from parts
)

select
    requests.* exclude (row_id),
    unnest(judged.extracted),
    judged.* exclude (row_id, answer, extracted),
    case when judged.error is null then 'ok' else 'error' end as status,
    $model as model,
    $run_id as run_id,
    $created_at as created_at
from requests
inner join judged on judged.row_id = requests.row_id
