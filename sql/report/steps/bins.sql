-- purpose: a run's steps in bins for a chart: each bin has neighbouring steps of one engine, with least, mean and most
-- grain:   one row per bin, at most $num_bins plus one per engine; with few steps, one step per bin
-- inputs:  report_timeline
-- parameters: $num_bins
--
-- Columns ending in _at_max are of the bin's step with the most KV blocks in use: blocks of prefixes, of requests' own
-- tokens, and blocks that the LRU cache holds on top of these; null if the run did not record them. max_held_kv_blocks
-- includes cached blocks, max_rows includes padding, max_swapped_kv_blocks counts blocks in host memory.

with numbered as (
    select
        *,
        position * least($num_bins, count(*) over ()) // count(*) over () as place
    from report_timeline
)

select
    min(position) as first_position,
    max(position) as last_position,
    any_value(engine) as engine,
    min(partition) as first_partition,
    max(partition) as last_partition,
    min(started_seconds) as started_seconds,
    max(ended_seconds) as ended_seconds,
    avg(num_decode_tokens) as mean_decode_tokens,
    avg(num_suffix_tokens) as mean_suffix_tokens,
    avg(num_prefix_tokens) as mean_prefix_tokens,
    avg(num_padding_tokens) as mean_padding_tokens,
    min(num_tokens) as min_tokens,
    max(num_tokens) as max_tokens,
    max(num_tokens + num_padding_tokens) as max_rows,
    avg(num_kv_blocks_used) as mean_kv_blocks,
    min(num_kv_blocks_used) as min_kv_blocks,
    max(num_kv_blocks_used) as max_kv_blocks,
    arg_max(num_prefix_kv_blocks, (num_kv_blocks_used, position)) as prefix_kv_blocks_at_max,
    arg_max(num_request_kv_blocks, (num_kv_blocks_used, position)) as request_kv_blocks_at_max,
    arg_max(num_cached_kv_blocks, (num_kv_blocks_used, position)) as cached_kv_blocks_at_max,
    max(num_kv_blocks_used + num_cached_kv_blocks) as max_held_kv_blocks,
    max(num_swapped_kv_blocks) as max_swapped_kv_blocks,
    avg(num_running_requests) as mean_running_requests,
    min(num_running_requests) as min_running_requests,
    max(num_running_requests) as max_running_requests,
    avg(num_waiting_requests) as mean_waiting_requests,
    min(num_waiting_requests) as min_waiting_requests,
    max(num_waiting_requests) as max_waiting_requests,
    sum(num_preempted_requests)::bigint as num_preempted_requests,
    bool_and(is_partition_cool_down) as is_cool_down
from numbered
group by engine, place
order by first_position
