-- purpose: the answers of one model in a workload's table
-- grain:   one row per run and request
-- inputs:  the workload's output table
-- identifiers: {view}, {table}, {runs}: runs of the model
-- parameters: none

create or replace temp view {view} as
select *
from {table}
where run_id in (select run_id from {runs})
