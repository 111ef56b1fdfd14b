-- purpose: store a fitted map
-- grain:   one row
-- inputs:  none
-- parameters: as the columns

insert into calibrations by name
select
    $workload as workload,
    $workload_digest as workload_digest,
    $model_digest as model_digest,
    $column_name as column_name,
    $label as label,
    $method as method,
    $slope as slope,
    $intercept as intercept,
    $thresholds::double[] as thresholds,
    $calibrated::double[] as calibrated,
    $num_rows as num_rows,
    $brier_before as brier_before,
    $brier_after as brier_after,
    $gold as gold,
    $created_at::timestamptz as created_at
