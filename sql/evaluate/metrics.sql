-- purpose: the metrics of an evaluation: gold first, and columns as a whole before their labels
-- grain:   one row per reference, column, label and metric
-- inputs:  evaluation_metrics
-- parameters: $evaluation_id

select reference, column_name, label, metric, value, low, high, num_rows
from evaluation_metrics
where evaluation_id = $evaluation_id
order by reference <> 'gold', reference, column_name, label is not null, label, metric
