-- purpose: the newest probabilities with their calibrated values; null if the workload and the model that gave them have
--          no map
-- grain:   one row per key, column of probabilities and entry
-- inputs:  the workload's view of newest answers, runs, calibrations, macros calibrated_probability_of and {entries_of}
-- identifiers: {view}, {latest}, {keys}, {columns}: of probabilities, {entries_of}: likeliest_entries_of for one entry,
--              probability_entries_of, where labels have probabilities, for that of each label
-- parameters: none

create or replace view {view} as
with answered as (
    select {keys}, run_id, {columns}
    from {latest}
),

probable as (
    select {keys}, run_id, {entries_of}(columns(* exclude ({keys}, run_id))) as '\0'
    from answered
),

listed as (
    unpivot probable
    on {columns}
    into name column_name value batchloom_entries
),

entries as (
    select * exclude (batchloom_entries), unnest(batchloom_entries) as batchloom_entry
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
