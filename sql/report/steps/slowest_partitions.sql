-- purpose: the slowest partitions of a run
-- grain:   one row per partition, slowest first, at most $num_rows
-- inputs:  report_timeline
-- parameters: $num_rows

select
    partition,
    count(*) as num_steps,
    sum(duration_ms) / 1000.0 as seconds,
    coalesce(sum(duration_ms) filter (where is_partition_cool_down), 0.0) / 1000.0 as cool_down_seconds,
    sum(num_tokens)::bigint as num_tokens,
    sum(num_tokens) / nullif(sum(duration_ms) / 1000.0, 0.0) as tokens_per_second,
    avg(utilisation) as utilisation,
    max(num_kv_blocks_used) as peak_kv_blocks,
    sum(num_finished_requests)::bigint as num_finished_requests,
    sum(num_preempted_requests)::bigint as num_preempted_requests
from report_timeline
group by partition
order by seconds desc, partition
limit $num_rows
