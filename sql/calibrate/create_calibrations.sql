-- purpose: monotone maps from the probabilities of a workload and model to the share of right gold rows
-- grain:   one row per workload digest, model digest, column and label
-- inputs:  none
-- parameters: none

create table if not exists calibrations (
    workload text,
    workload_digest text,      -- of prompt, decoding and labels: the map is for answers of this prompt only
    model_digest text,
    column_name text,
    label text,                -- null where the column is one probability
    method text,               -- isotonic, platt
    slope double,              -- platt: 1 / (1 + exp(-(slope * logit(p) + intercept)))
    intercept double,
    thresholds double[],       -- isotonic: linear between these probabilities, constant beyond them
    calibrated double[],
    num_rows bigint,           -- of gold
    brier_before double,       -- mean squared error of the uncalibrated probabilities
    brier_after double,        -- the same after calibration, by five-fold cross-validation
    gold text,
    created_at timestamptz
)
