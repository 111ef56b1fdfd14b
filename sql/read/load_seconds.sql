-- purpose: seconds that loading a model takes: the median of the newest runs that loaded it
-- grain:   one row; null if there are no such runs. Each later day on which a deadline kept a run from beginning takes
--          the longest of these times away, so that a few slow loads do not keep all later nights from beginning
-- inputs:  runs, steps
-- parameters: $model_digest, $device, $dtype (as in runs), $least_seconds (besides its steps; less did not load)

with of_model as (
    select run_id, started_at, infer_seconds, status
    from runs
    where
        model_digest = $model_digest
        and config ->> '$.engine.device' = $device
        and config ->> '$.engine.dtype' = $dtype
    order by started_at desc, run_id
    limit 200
),

loads as (
    select
        of_model.started_at,
        of_model.infer_seconds
        - epoch(max(steps.started_at + to_microseconds((steps.duration_ms * 1000)::bigint)) - min(steps.started_at))
            as load_seconds
    from of_model
    inner join steps on steps.run_id = of_model.run_id
    where of_model.infer_seconds >= $least_seconds
    group by of_model.run_id, of_model.started_at, of_model.infer_seconds
    having load_seconds >= $least_seconds
    order by of_model.started_at desc, of_model.run_id
    limit 20
),

refused as (
    select count(distinct started_at::date) as num_days
    from of_model
    where status = 'deadline' and infer_seconds is null and started_at > (select max(started_at) from loads)
),

kept as (
    select load_seconds
    from loads
    qualify row_number() over (order by load_seconds desc) > (select num_days from refused)
)

select median(load_seconds) as load_seconds
from kept
