-- purpose: the newest answers of a model in a workload's table
-- grain:   one row per key, or several where the newest run has rows with equal keys
-- inputs:  the workload's output table, runs
-- identifiers: {target}, {table}, {keys}
-- parameters: $model_digest

create or replace temp table {target} as
select *
from {table}
where run_id in (select run_id from runs where model_digest = $model_digest)
qualify rank() over (partition by {keys} order by created_at desc, run_id desc) = 1
