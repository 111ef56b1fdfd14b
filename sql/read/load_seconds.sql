-- purpose: seconds that the newest runs with a model took besides their steps: loading the model, if it was not loaded
-- grain:   one row per run, at most twenty
-- inputs:  runs, steps
-- parameters: $model_digest, $device, $dtype (as in runs)

with newest as (
    select run_id, infer_seconds
    from runs
    where
        model_digest = $model_digest
        and config ->> '$.engine.device' = $device
        and config ->> '$.engine.dtype' = $dtype
        and infer_seconds is not null
    order by started_at desc, run_id
    limit 20
)

select
    newest.infer_seconds
    - epoch(max(steps.started_at + to_microseconds((steps.duration_ms * 1000)::bigint)) - min(steps.started_at))
        as load_seconds
from newest
inner join steps on steps.run_id = newest.run_id
group by newest.run_id, newest.infer_seconds
having min(steps.started_at) is not null
order by load_seconds
