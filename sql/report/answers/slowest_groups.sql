-- purpose: the prefix groups that took most of a run's time
-- grain:   one row per group, slowest first, at most $num_rows; none if the run did not record compute_ms
-- inputs:  the workload's output table, report_plan_groups
-- identifiers: {table}, {keys}
-- parameters: $run_id, $num_rows
--
-- num_groups counts the groups of the whole run. share_degree counts distinct prompts; it and num_prefix_tokens are null
-- if the plan is deleted. num_computed_prompt_tokens excludes cached tokens. dearest_key is the key of the slowest row:
-- if the prefix is long, the row charged with it.

with answers as (
    select
        prefix_group,
        compute_ms,
        num_prompt_tokens,
        num_cached_tokens,
        num_output_tokens,
        array_to_string([{keys}], ', ') as request_key
    from (
        from {table}
        union all by name -- for tables made by an earlier version
        select null::double as compute_ms, null::bigint as prefix_group where false
    )
    where run_id = $run_id and prefix_group is not null
),

grouped as (
    select
        prefix_group,
        sum(compute_ms) / 1000.0 as seconds,
        sum(sum(compute_ms)) over () / 1000.0 as all_seconds,
        count(*) over () as num_groups,
        count(*) as num_rows,
        sum(num_prompt_tokens)::bigint as num_prompt_tokens,
        sum(num_prompt_tokens - num_cached_tokens)::bigint as num_computed_prompt_tokens,
        sum(num_output_tokens)::bigint as num_output_tokens,
        arg_max(request_key, (compute_ms, request_key)) as dearest_key
    from answers
    group by prefix_group
)

select
    grouped.prefix_group,
    grouped.num_groups,
    grouped.seconds,
    grouped.seconds / nullif(grouped.all_seconds, 0.0) as share_of_time,
    report_plan_groups.share_degree,
    report_plan_groups.num_prefix_tokens,
    grouped.num_rows,
    grouped.num_prompt_tokens,
    grouped.num_computed_prompt_tokens,
    grouped.num_output_tokens,
    grouped.dearest_key
from grouped
left join report_plan_groups on report_plan_groups.prefix_group = grouped.prefix_group
order by grouped.seconds desc, grouped.prefix_group
limit $num_rows
