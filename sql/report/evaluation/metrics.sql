-- purpose: metrics of an evaluation with their 95% confidence intervals
-- grain:   one row per reference, column, label and metric
-- inputs:  evaluation_metrics
-- parameters: $evaluation_id

select
    column_name,
    coalesce(label, '') as label,
    metric || case when reference = 'gold' then '' else ' with ' || reference end as metric,
    value,
    low,
    high,
    num_rows
from evaluation_metrics
where evaluation_id = $evaluation_id
order by reference <> 'gold', reference, column_name, evaluation_metrics.label is not null, label, metric
