-- purpose: a run's steps in the order they were done, with clock, utilisation and cool-down; the other report_*.sql read it
-- grain:   one row a step; position counts from 0 through all partitions
-- inputs:  runs, steps
-- parameters: $run_id
--
-- A step is busy if it is full (its tokens reach the chunk size) or leaves requests waiting. The cool-down of a partition
-- is what comes after its last busy step: nothing is left to fill a step with. The cool-down of the run, which TECD
-- (BatchLLM section 6.3.2) leaves out, is that of its last partition. Where the run's config does not name a chunk size,
-- its largest step stands in.

create or replace temp table report_timeline as
with settings as (
    select try_cast(config ->> '$.engine.chunk_tokens' as bigint) as chunk_tokens
    from runs
    where run_id = $run_id
),

counted as (
    select
        partition,
        step,
        num_decode_tokens,
        num_suffix_tokens,
        num_prefix_tokens,
        num_decode_tokens + num_suffix_tokens + num_prefix_tokens as num_tokens,
        num_kv_blocks_used,
        num_prefix_kv_blocks,
        num_request_kv_blocks,
        num_cached_kv_blocks,
        num_kv_blocks_total,
        num_running_requests,
        num_waiting_requests,
        num_finished_requests,
        num_preempted_requests,
        duration_ms,
        row_number() over (order by partition, step) - 1 as position,
        sum(duration_ms) over (order by partition, step) / 1000.0 as ended_seconds
    from (
        from steps
        union all by name -- a table made by an earlier version
        select
            null::bigint as num_prefix_kv_blocks,
            null::bigint as num_request_kv_blocks,
            null::bigint as num_cached_kv_blocks
        where false
    )
    where run_id = $run_id
),

sized as (
    select
        counted.*,
        greatest(coalesce(settings.chunk_tokens, max(counted.num_tokens) over ()), 1) as chunk_tokens
    from counted
    left join settings on true
),

busy as (
    select
        *,
        max(position) filter (where num_waiting_requests > 0 or num_tokens >= chunk_tokens)
            over (partition by partition) as last_busy_position,
        max(partition) over () as last_partition
    from sized
),

final as (
    select
        position,
        partition,
        step,
        num_decode_tokens,
        num_suffix_tokens,
        num_prefix_tokens,
        num_tokens,
        chunk_tokens,
        num_tokens / chunk_tokens as utilisation,
        num_kv_blocks_used,
        num_prefix_kv_blocks,
        num_request_kv_blocks,
        num_cached_kv_blocks,
        num_kv_blocks_total,
        num_running_requests,
        num_waiting_requests,
        num_finished_requests,
        num_preempted_requests,
        duration_ms,
        ended_seconds - duration_ms / 1000.0 as started_seconds,
        ended_seconds,
        position > coalesce(last_busy_position, -1) as is_partition_cool_down,
        partition = last_partition and position > coalesce(last_busy_position, -1) as is_cool_down
    from busy
)

select *
from final
order by position
