-- purpose: rank the newest answers by score, then by key, within each group with an answer of the run; equal requests
--          share a rank
-- grain:   the newest answers of these groups; older answers keep their rank
-- inputs:  the workload's output table
-- identifiers: {table}, {rank_within}, {keys}
-- parameters: $run_id

update {table}
set rank = batchloom_ranked.rank
from (
    with newest as (
        select rowid as answer_rowid, {rank_within} as rank_group, [{keys}] as request_key, score, status
        from {table}
        where {rank_within} in (select {rank_within} from {table} where run_id = $run_id)
        qualify rank() over (partition by {keys} order by created_at desc, run_id desc) = 1
    )

    select
        answer_rowid,
        (dense_rank() over (partition by rank_group order by score desc, request_key))::integer as rank
    from newest
    where status = 'ok'
) as batchloom_ranked
where {table}.rowid = batchloom_ranked.answer_rowid
