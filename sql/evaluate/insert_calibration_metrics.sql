-- purpose: expected calibration error: the distance between confidence and share of right answers, in ten bins of equal
--          width, weighted by rows
-- grain:   one row per column with confidences
-- inputs:  evaluated_rows, macros weight_of and bootstrap_quantile
-- parameters: $evaluation_id, $num_replicates, $fewest_rows (of a bootstrap; with fewer there is no interval)

insert into evaluation_metrics by name
with binned as (
    select column_name, hash(request_key) as draw, confidence, is_right, least(floor(confidence * 10), 9) as tenth
    from evaluated_rows
    where
        evaluation_id = $evaluation_id
        and reference = 'gold'
        and confidence is not null
        and is_right is not null
),

bins as (
    select
        binned.column_name,
        replicates.range as replicate,
        binned.tenth,
        sum(weight_of(binned.draw, replicates.range)) as weight,
        sum(weight_of(binned.draw, replicates.range) * (binned.is_right::integer - binned.confidence)) as gap
    from binned
    cross join range(0, $num_replicates + 1) as replicates
    group by all
),

errors as (
    select column_name, replicate, sum(abs(gap)) / nullif(sum(weight), 0) as value, sum(weight) as num_rows
    from bins
    group by all
)

select
    $evaluation_id as evaluation_id,
    'gold' as reference,
    column_name,
    'ece' as metric,
    any_value(value) filter (replicate = 0) as value,
    bootstrap_quantile(value, replicate, num_rows, $fewest_rows, 0.025) as low,
    bootstrap_quantile(value, replicate, num_rows, $fewest_rows, 0.975) as high,
    any_value(num_rows) filter (replicate = 0) as num_rows
from errors
group by column_name
