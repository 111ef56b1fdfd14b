-- purpose: when a run's answers were first written, so that writing them again keeps the time
-- grain:   one row
-- inputs:  the workload's output table
-- identifiers: {table}
-- parameters: $run_id

select min(created_at) as created_at
from {table}
where run_id = $run_id
