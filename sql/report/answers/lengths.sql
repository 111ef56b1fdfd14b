-- purpose: histograms of the lengths of a run's prompts, their computed parts, answers, and shared prefixes
-- grain:   one row per kind (prompt, computed, output, prefix) and bin [low, high) of equal width, empty bins too; for
--          kind prefix, num_rows counts groups that share one
-- inputs:  the workload's output table, report_plan_groups, macro report_nice_width
-- identifiers: {table}
-- parameters: $run_id, $num_bins

with lengths as (
    select unnest([
        {'kind': 'prompt', 'num_tokens': num_prompt_tokens},
        {'kind': 'computed', 'num_tokens': num_prompt_tokens - num_cached_tokens},
        {'kind': 'output', 'num_tokens': num_output_tokens}
    ], recursive := true)
    from {table}
    where run_id = $run_id and status = 'ok'
    union all
    select 'prefix' as kind, num_prefix_tokens as num_tokens
    from report_plan_groups
    where num_prefix_tokens > 0
),

widths as (
    select kind, max(num_tokens) as longest, report_nice_width(max(num_tokens), $num_bins) as width
    from lengths
    where num_tokens is not null
    group by kind
),

bins as (
    select kind, width, unnest(range(longest // width + 1)) as bin
    from widths
),

counted as (
    select lengths.kind, lengths.num_tokens // widths.width as bin, count(*) as num_rows
    from lengths
    inner join widths on widths.kind = lengths.kind
    group by all
)

select
    bins.kind,
    (bins.bin * bins.width)::bigint as low,
    ((bins.bin + 1) * bins.width)::bigint as high,
    coalesce(counted.num_rows, 0) as num_rows
from bins
left join counted on counted.kind = bins.kind and counted.bin = bins.bin
order by bins.kind, bins.bin
