-- purpose: histogram of how full the steps were: tokens of a step over the token budget
-- grain:   one row per tenth, 0 to 9; the last includes full steps
-- inputs:  report_timeline
-- parameters: none

with tenths as (
    select unnest(range(10)) as tenth
),

steps_by_tenth as (
    select
        least(floor(utilisation * 10), 9)::bigint as tenth,
        count(*) as num_steps,
        sum(duration_ms) / 1000.0 as seconds,
        sum(duration_ms) filter (where is_partition_cool_down) / 1000.0 as cool_down_seconds
    from report_timeline
    group by all
)

select
    tenths.tenth,
    coalesce(steps_by_tenth.num_steps, 0) as num_steps,
    coalesce(steps_by_tenth.seconds, 0.0) as seconds,
    coalesce(steps_by_tenth.cool_down_seconds, 0.0) as cool_down_seconds
from tenths
left join steps_by_tenth on steps_by_tenth.tenth = tenths.tenth
order by tenths.tenth
