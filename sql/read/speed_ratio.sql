-- purpose: measured over simulated time of the steps, the median of the newest predicted runs with a model
-- grain:   one row; null if no such run has steps
-- inputs:  runs, steps
-- parameters: $model_digest, $device, $dtype (as in runs)

with newest as (
    select
        run_id,
        (config ->> '$.prediction.step_seconds')::double as step_seconds,
        (config ->> '$.prediction.num_computed_tokens')::double as num_tokens,
        coalesce((config ->> '$.prediction.speed_ratio')::double, 1) as speed_ratio
    from runs
    where
        model_digest = $model_digest
        and config ->> '$.engine.device' = $device
        and config ->> '$.engine.dtype' = $dtype
        and step_seconds > 0
        and num_tokens > 0
    order by started_at desc, run_id
    limit 5
),

of_each as (
    select
        newest.speed_ratio
        * (sum(steps.duration_ms) / 1000 / sum(num_prefix_tokens + num_suffix_tokens + num_decode_tokens))
        / (any_value(newest.step_seconds) / any_value(newest.num_tokens)) as ratio
    from newest
    inner join steps on steps.run_id = newest.run_id
    group by newest.run_id, newest.speed_ratio
    having sum(num_prefix_tokens + num_suffix_tokens + num_decode_tokens) > 0
)

select median(ratio) as speed_ratio
from of_each
