-- purpose: a run's steps in the order they were done, with clock, utilisation and cool-down; the others of this folder read it
-- grain:   one row a step; position counts from 0 through all engines, and through all partitions of each
-- inputs:  runs, steps
-- parameters: $run_id
--
-- Where several engines work side by side, their steps come engine by engine: each has its own KV memory and its own
-- chunk to fill. So started_seconds and ended_seconds, the time of steps, count through all engines, and
-- engine_started_seconds from the beginning of each. An engine's partitions come in the order in which it did them.
--
-- A step is busy if it is full (its tokens, padding included, reach the chunk size) or leaves requests waiting. The
-- cool-down of a partition is what comes after its last busy step: nothing is left to fill a step with. The cool-down of
-- the run, which TECD (BatchLLM section 6.3.2) leaves out, is that of each engine's last partition. Where the run's config
-- does not name a chunk size, its largest step stands in.

create or replace temp table report_timeline as
with settings as (
    -- runs written before the setting was renamed have it as chunk_tokens
    select
        try_cast(
            coalesce(config ->> '$.engine.max_num_batched_tokens', config ->> '$.engine.chunk_tokens') as bigint
        ) as max_num_batched_tokens
    from runs
    where run_id = $run_id
),

done as (
    select
        partition,
        step,
        num_decode_tokens,
        num_suffix_tokens,
        num_prefix_tokens,
        coalesce(num_padding_tokens, 0) as num_padding_tokens,
        num_decode_tokens + num_suffix_tokens + num_prefix_tokens as num_tokens,
        num_kv_blocks_used,
        num_prefix_kv_blocks,
        num_request_kv_blocks,
        num_cached_kv_blocks,
        coalesce(num_swapped_kv_blocks, 0) as num_swapped_kv_blocks,
        num_kv_blocks_total,
        num_running_requests,
        num_waiting_requests,
        num_finished_requests,
        num_preempted_requests,
        duration_ms,
        coalesce(worker, '') as worker,
        started_at
    from (
        from steps
        union all by name -- a table made by an earlier version
        select
            null::bigint as num_prefix_kv_blocks,
            null::bigint as num_request_kv_blocks,
            null::bigint as num_cached_kv_blocks,
            null::bigint as num_padding_tokens,
            null::bigint as num_swapped_kv_blocks,
            null::varchar as worker,
            null::timestamptz as started_at
        where false
    )
    where run_id = $run_id
),

engines as (
    select worker, row_number() over (order by min(started_at), worker) - 1 as engine
    from done
    group by worker
),

begun as (
    select
        done.*,
        engines.engine,
        min(done.started_at) over (partition by done.worker, done.partition) as partition_started_at
    from done
    inner join engines on engines.worker = done.worker
),

placed as (
    select
        *,
        row_number() over in_turn - 1 as position,
        sum(duration_ms) over in_turn / 1000.0 as ended_seconds,
        sum(duration_ms) over (partition by engine order by partition_started_at, partition, step) / 1000.0
            as engine_ended_seconds
    from begun
    window in_turn as (order by engine, partition_started_at, partition, step)
),

sized as (
    select
        placed.*,
        greatest(coalesce(settings.max_num_batched_tokens, max(placed.num_tokens) over ()), 1) as max_num_batched_tokens
    from placed
    left join settings on true
),

busy as (
    select
        *,
        max(position) filter (where num_waiting_requests > 0 or num_tokens + num_padding_tokens >= max_num_batched_tokens)
            over (partition by engine, partition) as last_busy_position,
        last_value(partition) over (
            partition by engine order by position rows between unbounded preceding and unbounded following
        ) as last_partition
    from sized
),

final as (
    select
        position,
        engine,
        worker,
        partition,
        step,
        num_decode_tokens,
        num_suffix_tokens,
        num_prefix_tokens,
        num_padding_tokens,
        num_tokens,
        max_num_batched_tokens,
        num_tokens / max_num_batched_tokens as utilisation,
        num_kv_blocks_used,
        num_prefix_kv_blocks,
        num_request_kv_blocks,
        num_cached_kv_blocks,
        num_swapped_kv_blocks,
        num_kv_blocks_total,
        num_running_requests,
        num_waiting_requests,
        num_finished_requests,
        num_preempted_requests,
        duration_ms,
        ended_seconds - duration_ms / 1000.0 as started_seconds,
        ended_seconds,
        engine_ended_seconds - duration_ms / 1000.0 as engine_started_seconds,
        started_at,
        position > coalesce(last_busy_position, -1) as is_partition_cool_down,
        partition = last_partition and position > coalesce(last_busy_position, -1) as is_cool_down
    from busy
)

select *
from final
order by position
