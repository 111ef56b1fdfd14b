-- purpose: the runs in which a model answered
-- grain:   one row per run
-- inputs:  runs
-- identifiers: {runs}
-- parameters: $model_digest

create or replace temp table {runs} as
select run_id
from runs
where model_digest = $model_digest
