-- purpose: rows whose newest answer is an error, with the reason
-- grain:   one row per key
-- inputs:  the workload's view of newest answers
-- identifiers: {view}, {latest}, {keys}
-- parameters: none

create or replace view {view} as
select {keys}, finish_reason, error, run_id, created_at
from {latest}
where status = 'error'
