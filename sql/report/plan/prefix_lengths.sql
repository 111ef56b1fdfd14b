-- purpose: histogram of the lengths of a plan's shared prefixes
-- grain:   one row per bin [low, high) of equal width, empty bins too; groups without a prefix do not count
-- inputs:  the run's plan artifact; the macro report_nice_width
-- parameters: $plan (path), $num_bins

with prefixes as (
    select group_id, max(num_prefix_tokens) as num_tokens
    from read_parquet($plan)
    where num_prefix_tokens > 0
    group by group_id
),

widths as (
    select max(num_tokens) as longest, report_nice_width(max(num_tokens), $num_bins) as width
    from prefixes
    having count(*) > 0
),

bins as (
    select width, unnest(range(longest // width + 1)) as bin
    from widths
),

counted as (
    select prefixes.num_tokens // widths.width as bin, count(*) as num_groups
    from prefixes
    cross join widths
    group by all
)

select
    'prefix' as kind,
    (bins.bin * bins.width)::bigint as low,
    ((bins.bin + 1) * bins.width)::bigint as high,
    coalesce(counted.num_groups, 0) as num_rows
from bins
left join counted on counted.bin = bins.bin
order by bins.bin
