-- purpose: the newest probabilities with their calibrated values, of the likeliest label where labels have
--          probabilities; null if the workload and the model that gave them have no map
-- grain:   one row per key and column of probabilities
-- inputs:  the workload's view of newest answers, runs, calibrations, macros calibrated_probability_of and likeliest_of
-- identifiers: {view}, {latest}, {keys}, {columns}: of probabilities
-- parameters: none

create or replace view {view} as
with answered as (
    select {keys}, run_id, {columns}
    from {latest}
    where status = 'ok'
),

chosen as (
    select {keys}, run_id, likeliest_of(columns(* exclude ({keys}, run_id))) as '\0'
    from answered
),

listed as (
    unpivot chosen
    on {columns}
    into name column_name value batchloom_entry
)

select
    listed.* exclude (batchloom_entry),
    listed.batchloom_entry.probability,
    calibrated_probability_of(
        listed.batchloom_entry.probability,
        calibrations.method,
        calibrations.slope,
        calibrations.intercept,
        calibrations.thresholds,
        calibrations.calibrated
    ) as calibrated_probability
from listed
left join runs on runs.run_id = listed.run_id
left join calibrations
    on calibrations.workload_digest = runs.workload_digest
    and calibrations.model_digest = runs.model_digest
    and calibrations.column_name = listed.column_name
    and calibrations.label is not distinct from listed.batchloom_entry.label
where listed.batchloom_entry.probability is not null
