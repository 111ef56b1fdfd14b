-- purpose: insert the rows that could not be tried, with the reason
-- grain:   one row per request with an error in requests or tokens
-- inputs:  the run's artifacts
-- identifiers: {table}
-- parameters: $requests (path), $errors (paths of artifacts with row_id and error), $keys, $model, $run_id, $created_at

insert into {table} by name
with requests as (
    select row_id, content_key, columns($keys) as 'key_\0'
    from read_parquet($requests)
),

errors as (
    select row_id, min(error) as error
    from read_parquet($errors, union_by_name = true)
    where error is not null
    group by row_id
)

select
    columns('^key_(.*)$') as '\1',
    'error' as status,
    errors.error,
    'invalid' as finish_reason,
    $model as model,
    $run_id as run_id,
    $created_at as created_at,
    requests.content_key
from requests
inner join errors on errors.row_id = requests.row_id
