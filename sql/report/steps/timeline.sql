-- purpose: a run's steps in order, with clock, utilisation and cool-down; the other queries of this folder read it
-- grain:   one row per step, with the columns of steps; position counts from 0, engine by engine and partition by
--          partition
-- inputs:  runs, steps
-- parameters: $run_id
--
-- If several engines worked side by side, their steps come engine by engine: each engine has its own KV memory and token
-- budget. started_seconds and ended_seconds add up the steps of all engines; engine_started_seconds those of one engine.
-- Partitions come in the order in which their engine computed them.
--
-- A step is busy if it is full (its tokens with padding reach the token budget) or leaves requests waiting. The cool-down
-- of a partition is all steps after its last busy one: nothing is left to fill them. The cool-down of the run is that of
-- each engine's last partition; TECD (BatchLLM section 6.3.2) leaves it out. Where the token budget is "auto", the config
-- has the number that engines on a GPU took for it as step_tokens. Without a number, the largest step of the run stands
-- for the budget; where it is "auto", at least the 2,048 tokens that a CPU takes.

create or replace temp table report_timeline as
with settings as (
    select
        config ->> '$.engine.max_num_batched_tokens' as token_budget,
        coalesce(try_cast(token_budget as bigint), (config ->> '$.step_tokens')::bigint) as max_num_batched_tokens,
        if(token_budget = 'auto', 2048, 1) as least_tokens
    from runs
    where run_id = $run_id
),

done as (
    select
        * replace (
            coalesce(num_padding_tokens, 0) as num_padding_tokens,
            coalesce(num_swapped_kv_blocks, 0) as num_swapped_kv_blocks,
            coalesce(worker, '') as worker
        ),
        num_decode_tokens + num_suffix_tokens + num_prefix_tokens as num_tokens
    from (
        from steps
        union all by name -- for a table made by an earlier version
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
        greatest(
            coalesce(settings.max_num_batched_tokens, max(placed.num_tokens) over ()), settings.least_tokens
        ) as max_num_batched_tokens
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
        * exclude (partition_started_at, last_busy_position, last_partition),
        num_tokens / max_num_batched_tokens as utilisation,
        ended_seconds - duration_ms / 1000.0 as started_seconds,
        engine_ended_seconds - duration_ms / 1000.0 as engine_started_seconds,
        position > coalesce(last_busy_position, -1) as is_partition_cool_down,
        partition = last_partition and position > coalesce(last_busy_position, -1) as is_cool_down
    from busy
)

select *
from final
order by position
