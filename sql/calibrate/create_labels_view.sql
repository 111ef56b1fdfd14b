-- purpose: the newest probabilities of labels with their calibrated values; null if the workload and the model that gave
--          them have no map
-- grain:   one row per key, column of probabilities and label
-- inputs:  the workload's view of newest answers, runs, calibrations, macros calibrated_probability_of and
--          probability_entries_of
-- identifiers: {view}, {latest}, {keys}, {columns}: of probabilities of labels
-- parameters: none

create or replace view {view} as
with answered as (
    select {keys}, run_id, {columns}
    from {latest}
    where status = 'ok'
),

listed as (
    unpivot answered
    on {columns}
    into name column_name value batchloom_value
),

entries as (
    select * exclude (batchloom_value), unnest(probability_entries_of(batchloom_value)) as batchloom_entry
    from listed
)

select
    entries.* exclude (batchloom_entry),
    unnest(entries.batchloom_entry.shown),
    calibrated_probability_of(
        entries.batchloom_entry.shown.probability,
        calibrations.method,
        calibrations.slope,
        calibrations.intercept,
        calibrations.thresholds,
        calibrations.calibrated
    ) as calibrated_probability
from entries
left join runs on runs.run_id = entries.run_id
left join calibrations
    on calibrations.workload_digest = runs.workload_digest
    and calibrations.model_digest = runs.model_digest
    and calibrations.column_name = entries.column_name
    and calibrations.label is not distinct from entries.batchloom_entry.label
