-- purpose: when a run's answers were first written, so that writing them again keeps the time; else now, or just before
--          the answers of runs that began later and were written earlier, or just after the newest answer in the table
--          where the clock was set back since
-- grain:   one row
-- inputs:  runs, the workload's output table
-- identifiers: {table}
-- parameters: $run_id, $started_at, $now

select
    coalesce(
        min(created_at) filter (where run_id = $run_id),
        case
            when $now > max(created_at)
                then
                    min(created_at) filter (
                        where run_id in (select run_id from runs where started_at > $started_at::timestamptz)
                    ) - interval 1 microsecond
        end,
        greatest($now, max(created_at) + interval 1 microsecond)
    ) as created_at
from {table}
