-- purpose: insert the step records of a run
-- grain:   one row per step
-- inputs:  the run's step artifacts
-- parameters: $steps (paths), $run_id

insert into steps by name
select
    $run_id as run_id,
    partition,
    step,
    num_decode_tokens,
    num_suffix_tokens,
    num_prefix_tokens,
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
    num_padding_tokens,
    num_swapped_kv_blocks,
    num_guessed_tokens,
    num_right_tokens,
    worker,
    started_at
from (
    from read_parquet($steps, union_by_name = true)
    union all by name -- for steps written by an earlier version
    select
        null::bigint as num_prefix_kv_blocks,
        null::bigint as num_request_kv_blocks,
        null::bigint as num_cached_kv_blocks,
        null::bigint as num_padding_tokens,
        null::bigint as num_swapped_kv_blocks,
        null::bigint as num_guessed_tokens,
        null::bigint as num_right_tokens,
        null::varchar as worker,
        null::timestamptz as started_at
    where false
)
