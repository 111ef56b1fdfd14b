-- purpose: what the engine did, step by step
-- grain:   one row a step
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
    num_kv_blocks_total,
    num_running_requests,
    num_waiting_requests,
    num_finished_requests,
    num_preempted_requests,
    duration_ms
from read_parquet($steps)
