-- purpose: a sample of the rows to answer, stratified by share degree and prompt length: every n-th row in an order by
--          both, random within a stratum; the same at every call
-- grain:   one row per chosen row
-- inputs:  requests (of the rows to choose from), plan and tokens artifacts, as files
-- parameters: $requests, $plan, $tokens, $num_rows, $seed, $num_questions (prompts per row)

with groups as (
    select group_id, count(distinct row_id // $num_questions) as num_rows
    from read_parquet($plan)
    group by group_id
),

planned as (
    select prompts.row_id, case when prompts.num_prefix_tokens > 0 then groups.num_rows else 1 end as share_degree
    from read_parquet($plan) as prompts
    inner join groups on groups.group_id = prompts.group_id
),

measured as (
    select
        planned.row_id // $num_questions as row_id,
        max(planned.share_degree) as share_degree,
        max(len(tokens.token_ids)) as num_prompt_tokens
    from planned
    inner join read_parquet($tokens) as tokens on tokens.row_id = planned.row_id
    where planned.row_id // $num_questions in (select requests.row_id from read_parquet($requests) as requests)
    group by all
),

tiered as (
    select *, ntile(4) over (order by num_prompt_tokens, row_id) as length_tier
    from measured
),

ordered as (
    select
        *,
        row_number() over (
            order by floor(log2(share_degree)), length_tier, hash(xor(hash(row_id), hash($seed))), row_id
        ) as place,
        count(*) over () as num_all
    from tiered
)

select row_id, share_degree, num_prompt_tokens
from ordered
where -- the middle of each n-th
    floor(place * least($num_rows, num_all) / num_all + 0.5)
    > floor((place - 1) * least($num_rows, num_all) / num_all + 0.5)
order by row_id
