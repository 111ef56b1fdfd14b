-- purpose: totals per engine of a run, if several worked side by side
-- grain:   one row per engine, in the order in which they started
-- inputs:  report_timeline
-- parameters: none

select
    engine,
    any_value(worker) as worker,
    count(distinct partition) as num_partitions,
    count(*) as num_steps,
    sum(num_tokens)::bigint as num_tokens,
    sum(duration_ms) / 1000.0 as seconds,
    coalesce(sum(duration_ms) filter (where not is_cool_down), 0.0) / 1000.0 as tecd_seconds,
    avg(utilisation) as utilisation,
    max(num_kv_blocks_used) as peak_kv_blocks,
    max(num_kv_blocks_total) as num_kv_blocks_total
from report_timeline
group by engine
order by engine
