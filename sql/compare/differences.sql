-- purpose: how much better the second workload's answers are than the first's on the same rows: the mean of each measure
--          for both, and of its difference per row with a bootstrap interval over rows
-- grain:   one row per column and measure
-- inputs:  evaluated_rows with the evaluations 'first' and 'second', macro weight_of
-- parameters: $num_replicates, $fewest_rows (of a bootstrap; with fewer there is no interval)

with entries as (
    select evaluation_id, column_name, request_key, unnest(map_entries(measures)) as measure
    from evaluated_rows
    where reference = 'gold' and status <> 'unanswered'
),

paired as (
    select
        one.column_name,
        one.measure.key as metric,
        hash(one.request_key) as draw,
        one.measure.value as first_value,
        two.measure.value as second_value
    from entries as one
    inner join entries as two
        on two.evaluation_id = 'second'
        and lower(two.column_name) = lower(one.column_name)
        and two.request_key = one.request_key
        and two.measure.key = one.measure.key
    where one.evaluation_id = 'first'
),

resampled as (
    select
        paired.column_name,
        paired.metric,
        replicates.range as replicate,
        sum(weight_of(paired.draw, replicates.range) * (paired.second_value - paired.first_value))
        / nullif(sum(weight_of(paired.draw, replicates.range)), 0) as difference
    from paired
    cross join range(1, $num_replicates + 1) as replicates
    group by all
),

intervals as (
    select column_name, metric, quantile_cont(difference, 0.025) as low, quantile_cont(difference, 0.975) as high
    from resampled
    group by all
    having max(difference) - min(difference) > 1e-9 -- rows with the same difference are no proof that others have it
),

points as (
    select
        column_name,
        metric,
        avg(first_value) as first_value,
        avg(second_value) as second_value,
        avg(second_value - first_value) as difference,
        count(*) as num_rows
    from paired
    group by all
)

select
    points.column_name,
    points.metric,
    points.first_value,
    points.second_value,
    points.difference,
    intervals.low,
    intervals.high,
    points.num_rows
from points
left join intervals
    on intervals.column_name = points.column_name
    and intervals.metric = points.metric
    and points.num_rows >= $fewest_rows
order by points.column_name, points.metric
