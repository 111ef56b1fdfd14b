-- purpose: the metrics of the newest evaluation of each workload
-- grain:   one row per workload, reference, column, label and metric
-- inputs:  evaluations, evaluation_metrics
-- parameters: none

create or replace view latest_evaluation_metrics as
with newest as (
    select evaluation_id, workload, gold, answers, created_at
    from evaluations
    qualify row_number() over (partition by workload order by created_at desc, evaluation_id desc) = 1
)

select
    newest.workload,
    newest.created_at,
    newest.gold,
    newest.answers,
    evaluation_metrics.reference,
    evaluation_metrics.column_name,
    evaluation_metrics.label,
    evaluation_metrics.metric,
    evaluation_metrics.value,
    evaluation_metrics.low,
    evaluation_metrics.high,
    evaluation_metrics.num_rows
from newest
inner join evaluation_metrics on evaluation_metrics.evaluation_id = newest.evaluation_id
order by all
