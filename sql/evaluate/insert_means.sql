-- purpose: the metrics that are means over rows; those that are shares of rows have Wilson's intervals
-- grain:   one row per reference, column and measure
-- inputs:  evaluated_rows, macros batchloom_wilson_low, batchloom_wilson_high, weight_of and bootstrap_quantile
-- parameters: $evaluation_id, $num_replicates, $fewest_rows (of a bootstrap; with fewer there is no interval)

insert into evaluation_metrics by name
with entries as (
    select reference, column_name, hash(request_key) as draw, unnest(map_entries(measures)) as measure
    from evaluated_rows
    where evaluation_id = $evaluation_id
),

measured as (
    select reference, column_name, draw, measure.key as metric, measure.value as value
    from entries
),

points as (
    select
        reference,
        column_name,
        metric,
        avg(value) as value,
        sum(value) as total,
        count(*) as num_rows,
        bool_and(metric in ('accuracy', 'agreement', 'coverage', 'exact_match') and value in (0, 1)) as is_share
    from measured
    group by all
),

resampled as (
    select
        measured.reference,
        measured.column_name,
        measured.metric,
        replicates.range as replicate,
        sum(weight_of(measured.draw, replicates.range) * measured.value)
        / nullif(sum(weight_of(measured.draw, replicates.range)), 0) as value,
        count(*) as num_rows
    from measured
    inner join points
        on points.reference = measured.reference
        and points.column_name = measured.column_name
        and points.metric = measured.metric
        and not points.is_share
    cross join range(0, $num_replicates + 1) as replicates
    group by all
),

intervals as (
    select
        reference,
        column_name,
        metric,
        bootstrap_quantile(value, replicate, num_rows, $fewest_rows, 0.025) as low,
        bootstrap_quantile(value, replicate, num_rows, $fewest_rows, 0.975) as high
    from resampled
    group by all
)

select
    $evaluation_id as evaluation_id,
    points.reference,
    points.column_name,
    points.metric,
    points.value,
    case when points.is_share then batchloom_wilson_low(points.total, points.num_rows) else intervals.low end as low,
    case when points.is_share then batchloom_wilson_high(points.total, points.num_rows) else intervals.high end as high,
    points.num_rows
from points
left join intervals
    on intervals.reference = points.reference
    and intervals.column_name = points.column_name
    and intervals.metric = points.metric
