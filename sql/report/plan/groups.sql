-- purpose: rows, share degree (number of distinct prompts) and prefix length of each prefix group
-- grain:   one row per group
-- inputs:  the run's plan artifact
-- parameters: $plan (path)

create or replace temp table report_plan_groups as
select
    group_id::bigint as prefix_group,
    count(*) as num_rows,
    count(distinct member_id) as share_degree,
    max(num_prefix_tokens)::bigint as num_prefix_tokens
from read_parquet($plan)
group by group_id
