-- purpose: the metrics of evaluations
-- grain:   one row per evaluation, reference, column, label (null for the column as a whole) and metric
-- inputs:  none
-- parameters: none

create table if not exists evaluation_metrics (
    evaluation_id text,
    reference text,
    column_name text,
    label text,
    metric text,
    value double,
    low double,                -- ends of the 95% confidence interval: Wilson's where the metric is a share of rows,
    high double,               -- else percentiles of a Poisson bootstrap over rows
    num_rows bigint            -- that the value is computed from
)
