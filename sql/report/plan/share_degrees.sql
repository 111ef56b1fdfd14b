-- purpose: histogram of share degrees: numbers of distinct prompts that share a prefix (BatchLLM section 6.2.2)
-- grain:   one row per non-empty range [low, high] of degrees: 1 to 8 each, then doubling
-- inputs:  the run's plan artifact
-- parameters: $plan (path)

with planned_groups as (
    select
        group_id,
        count(*) as num_rows,
        count(distinct member_id) as num_members,
        max(num_prefix_tokens) as num_prefix_tokens
    from read_parquet($plan)
    group by group_id
),

-- members of a group without a prefix share nothing: each counts as its own group
degrees as (
    select
        if(num_prefix_tokens > 0, num_members, 1) as degree,
        if(num_prefix_tokens > 0, 1, num_members) as num_groups,
        num_rows,
        num_members,
        num_prefix_tokens
    from planned_groups
),

ranges as (
    select
        *,
        if(degree <= 8, degree, (2 ** floor(log2(degree - 1)))::bigint + 1) as low,
        if(degree <= 8, degree, (2 ** floor(log2(degree - 1)))::bigint * 2) as high
    from degrees
)

select
    low,
    high,
    sum(num_groups)::bigint as num_groups,
    sum(num_members)::bigint as num_prompts,
    sum(num_rows)::bigint as num_rows,
    sum(num_prefix_tokens)::bigint as num_prefix_tokens
from ranges
group by low, high
order by low
