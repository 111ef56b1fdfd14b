-- purpose: precision, recall and F1 of each label, their macro mean, and Cohen's kappa; a row whose answer
--          is an error counts for recall and kappa. Two runs get kappa only.
-- grain:   one row per reference, column, label (null for all) and metric
-- inputs:  evaluated_rows, macros batchloom_wilson_low, batchloom_wilson_high, weight_of and bootstrap_quantile
-- parameters: $evaluation_id, $num_replicates, $fewest_rows (of a bootstrap; with fewer there is no interval)

insert into evaluation_metrics by name
with compared as (
    select reference, column_name, hash(request_key) as draw, expected, answer
    from evaluated_rows
    where evaluation_id = $evaluation_id and kind = 'label' and status <> 'unanswered'
),

cells as (
    select
        compared.reference,
        compared.column_name,
        replicates.range as replicate,
        compared.expected,
        compared.answer,
        sum(weight_of(compared.draw, replicates.range)) as weight
    from compared
    cross join range(0, $num_replicates + 1) as replicates
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

sums as (
    select
        reference,
        column_name,
        replicate,
        label,
        sum(num_expected) as num_expected,
        sum(num_answered) as num_answered,
        sum(num_right) as num_right
    from sides
    group by all
),

counts as (
    select *, 2 * num_right / nullif(num_expected + num_answered, 0) as f1
    from sums
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

resampled as (
    select
        reference,
        column_name,
        replicate,
        label,
        'f1' as metric,
        f1 as value,
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
),

bootstrapped as (
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
),

shares as (
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
    from bootstrapped
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
where (reference = 'gold' or metric = 'kappa') and value is not null
