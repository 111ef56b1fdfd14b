-- purpose: histogram of share degrees: numbers of distinct prompts that share a prefix (BatchLLM section 6.2.2)
-- grain:   one row per non-empty range [low, high] of degrees: 1 to 8 each, then doubling
-- inputs:  report_plan_groups
-- parameters: none

-- prompts of a group without a prefix share nothing: each counts as its own group
with degrees as (
    select
        if(num_prefix_tokens > 0, share_degree, 1) as degree,
        if(num_prefix_tokens > 0, 1, share_degree) as num_groups,
        share_degree as num_prompts,
        num_rows,
        num_prefix_tokens
    from report_plan_groups
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
    sum(num_prompts)::bigint as num_prompts,
    sum(num_rows)::bigint as num_rows,
    sum(num_prefix_tokens)::bigint as num_prefix_tokens
from ranges
group by low, high
order by low
