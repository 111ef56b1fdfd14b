-- purpose: the metrics of an evaluation: means of measures; precision, recall and F1 of each label, their macro mean and
--          Cohen's kappa, where a row whose answer is an error counts for recall and kappa, and two runs get kappa only;
--          expected calibration error: the distance between confidence and share of right answers, in ten bins of equal
--          width, weighted by rows. Shares of rows have Wilson's intervals, the others those of a bootstrap over rows
-- grain:   one row per reference, column, label (null for all) and metric
-- inputs:  evaluated_rows, macros batchloom_wilson_low, batchloom_wilson_high, weight_of and bootstrap_quantile
-- parameters: $evaluation_id, $num_replicates, $fewest_rows (of a bootstrap; with fewer there is no interval)

insert into evaluation_metrics by name
with compared as not materialized (
    select
        reference, column_name, kind, status, hash(request_key) as draw, expected, answer, is_right, confidence, measures
    from evaluated_rows
    where evaluation_id = $evaluation_id
),

replicates as (
    select unnest(range(0, $num_replicates + 1)) as replicate
),

measured as (
    select reference, column_name, draw, unnest(map_entries(measures)) as measure
    from compared
),

points as (
    select
        reference,
        column_name,
        measure.key as metric,
        sum(measure.value) as num_right,
        count(*) as num_rows,
        bool_and(measure.key in ('accuracy', 'agreement', 'coverage', 'exact_match') and measure.value in (0, 1))
            as is_share
    from measured
    group by all
),

means as (
    select
        measured.reference,
        measured.column_name,
        points.metric,
        replicates.replicate,
        sum(weight_of(measured.draw, replicates.replicate) * measured.measure.value)
        / nullif(sum(weight_of(measured.draw, replicates.replicate)), 0) as value,
        count(*) as num_rows
    from measured
    inner join points
        on points.reference = measured.reference
        and points.column_name = measured.column_name
        and points.metric = measured.measure.key
        and not points.is_share
    cross join replicates
    group by all
),

cells as (
    select
        compared.reference,
        compared.column_name,
        replicates.replicate,
        compared.expected,
        compared.answer,
        sum(weight_of(compared.draw, replicates.replicate)) as weight
    from compared
    cross join replicates
    where compared.kind = 'label' and compared.status <> 'unanswered'
    group by all
),

sides as (
    select
        reference,
        column_name,
        replicate,
        unnest([
            {'label': expected, 'num_expected': weight, 'num_answered': 0, 'num_right': 0},
            {'label': answer, 'num_expected': 0, 'num_answered': weight, 'num_right': if(answer = expected, weight, 0)}
        ], recursive := true)
    from cells
),

counts as (
    select
        reference,
        column_name,
        replicate,
        label,
        sum(num_expected) as num_expected,
        sum(num_answered) as num_answered,
        sum(num_right) as num_right,
        2 * sum(num_right) / nullif(sum(num_expected) + sum(num_answered), 0) as f1
    from sides
    group by all
),

totals as (
    select
        reference,
        column_name,
        replicate,
        sum(num_expected) as num_rows,
        sum(num_right) / nullif(sum(num_expected), 0) as share_right,
        sum(num_expected * num_answered) / nullif(sum(num_expected) ** 2, 0) as share_by_chance,
        avg(f1) filter (label is not null) as macro_f1
    from counts
    group by all
),

bins as (
    select
        compared.column_name,
        replicates.replicate,
        least(floor(compared.confidence * 10), 9) as tenth,
        sum(weight_of(compared.draw, replicates.replicate)) as weight,
        sum(weight_of(compared.draw, replicates.replicate) * (compared.is_right::integer - compared.confidence)) as gap
    from compared
    cross join replicates
    where compared.reference = 'gold' and compared.confidence is not null and compared.is_right is not null
    group by all
),

resampled as (
    select reference, column_name, null::varchar as label, metric, replicate, value, num_rows
    from means
    union all by name
    select
        reference, column_name, replicate, label, 'f1' as metric, f1 as value,
        num_expected + num_answered - num_right as num_rows
    from counts
    where label is not null
    union all by name
    select
        reference,
        column_name,
        replicate,
        unnest([
            {'metric': 'macro_f1', 'value': macro_f1},
            {'metric': 'kappa', 'value': (share_right - share_by_chance) / nullif(1 - share_by_chance, 0)}
        ], recursive := true),
        num_rows
    from totals
    union all by name
    select
        'gold' as reference, column_name, replicate, 'ece' as metric,
        sum(abs(gap)) / nullif(sum(weight), 0) as value, sum(weight) as num_rows
    from bins
    group by all
),

shares as (
    select reference, column_name, metric, num_right, num_rows
    from points
    where is_share
    union all by name
    select
        reference,
        column_name,
        label,
        unnest([
            {'metric': 'precision', 'num_rows': num_answered}, {'metric': 'recall', 'num_rows': num_expected}
        ], recursive := true),
        num_right
    from counts
    where replicate = 0 and label is not null
),

final as (
    select
        reference,
        column_name,
        label,
        metric,
        any_value(value) filter (replicate = 0) as value,
        bootstrap_quantile(value, replicate, num_rows, $fewest_rows, 0.025) as low,
        bootstrap_quantile(value, replicate, num_rows, $fewest_rows, 0.975) as high,
        any_value(num_rows) filter (replicate = 0) as num_rows
    from resampled
    group by all
    union all by name
    select
        * exclude (num_right),
        num_right / num_rows as value,
        batchloom_wilson_low(num_right, num_rows) as low,
        batchloom_wilson_high(num_right, num_rows) as high
    from shares
    where num_rows > 0
)

select $evaluation_id as evaluation_id, *
from final
where value is not null and (reference = 'gold' or metric not in ('precision', 'recall', 'f1', 'macro_f1'))
