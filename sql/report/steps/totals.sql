-- purpose: totals of a run's steps: tokens by kind, TECD, utilisation, KV memory, preemptions
-- grain:   one row; for a run without steps counts are 0 and the rest null
-- inputs:  report_timeline
-- parameters: none
--
-- step_seconds adds up all engines. elapsed_seconds and tecd_seconds are of the engine that took longest, since engines
-- work side by side. TECD is the time of all steps outside the run's cool-down; other columns with tecd in their name
-- are of these steps, too. partition_cool_down_seconds is the time in the cool-down of any partition. Utilisation is the
-- mean of tokens over token budget. A valley is a step less than half full outside any cool-down. Padding comes on top
-- of the three other kinds of tokens. span_seconds is from the start of the first step to the end of the last one.

with engines as (
    select
        engine,
        sum(duration_ms) / 1000.0 as seconds,
        coalesce(sum(duration_ms) filter (where not is_cool_down), 0.0) / 1000.0 as tecd_seconds
    from report_timeline
    group by engine
)

select
    count(*) as num_steps,
    count(distinct partition) as num_partitions,
    count(distinct engine) as num_engines,
    max(max_num_batched_tokens) as max_num_batched_tokens,
    coalesce(sum(num_decode_tokens), 0)::bigint as num_decode_tokens,
    coalesce(sum(num_suffix_tokens), 0)::bigint as num_suffix_tokens,
    coalesce(sum(num_prefix_tokens), 0)::bigint as num_prefix_tokens,
    coalesce(sum(num_padding_tokens), 0)::bigint as num_padding_tokens,
    coalesce(sum(duration_ms), 0.0) / 1000.0 as step_seconds,
    epoch(max(started_at + to_microseconds((duration_ms * 1000)::bigint)) - min(started_at)) as span_seconds,
    coalesce((select max(seconds) from engines), 0.0) as elapsed_seconds,
    coalesce((select max(tecd_seconds) from engines), 0.0) as tecd_seconds,
    count(*) filter (where not is_cool_down) as num_tecd_steps,
    coalesce(sum(duration_ms) filter (where is_partition_cool_down), 0.0) / 1000.0 as partition_cool_down_seconds,
    avg(utilisation) as utilisation,
    avg(utilisation) filter (where not is_cool_down) as tecd_utilisation,
    count(*) filter (where not is_partition_cool_down and utilisation < 0.5) as num_valley_steps,
    coalesce(sum(duration_ms) filter (where not is_partition_cool_down and utilisation < 0.5), 0.0) / 1000.0
        as valley_seconds,
    max(num_kv_blocks_used) as peak_kv_blocks,
    max(num_kv_blocks_total) as num_kv_blocks_total,
    coalesce(max(num_swapped_kv_blocks), 0) as peak_swapped_kv_blocks,
    coalesce(sum(num_preempted_requests), 0)::bigint as num_preempted_requests,
    count(*) filter (where num_preempted_requests > 0) as num_preempting_steps
from report_timeline
