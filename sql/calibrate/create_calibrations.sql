-- purpose: monotone maps from the probabilities of a workload and model to how often they were right in gold
-- grain:   one row a workload digest, model digest, column and label
-- inputs:  none
-- parameters: none

create table if not exists calibrations (
    workload text,
    workload_digest text,      -- of prompt, decoding and labels: answers of another prompt are not calibrated by it
    model_digest text,
    column_name text,
    label text,                -- null where the column is one probability
    method text,               -- isotonic, platt
    slope double,              -- platt: 1 / (1 + exp(-(slope * logit(p) + intercept)))
    intercept double,
    thresholds double[],       -- isotonic: straight lines between these probabilities, level beyond them
    calibrated double[],
    num_rows bigint,           -- of gold
    brier_before double,       -- mean squared error of the probabilities as they are
    brier_after double,        -- the same after maps fitted to the other rows, in five folds
    gold text,
    created_at timestamptz
)
