-- purpose: when a run's answers were first written, so that writing them again keeps the time; else now, or just after
--          the newest answer in the table where the clock was set back since
-- grain:   one row
-- inputs:  the workload's output table
-- identifiers: {table}
-- parameters: $run_id, $now

select
    coalesce(
        min(created_at) filter (where run_id = $run_id),
        greatest($now, max(created_at) + interval 1 microsecond)
    ) as created_at
from {table}
