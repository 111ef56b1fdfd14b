-- purpose: report_plan_groups without rows, for a run whose plan is deleted
-- grain:   no row
-- inputs:  none
-- parameters: none

create or replace temp table report_plan_groups as
select
    null::bigint as prefix_group,
    null::bigint as num_rows,
    null::bigint as share_degree,
    null::bigint as num_prefix_tokens
where false
