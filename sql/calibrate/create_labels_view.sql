-- purpose: the newest probabilities with their calibrated values; null if the workload and the model that gave them have
--          no map
-- grain:   one row per key, column of probabilities and label
-- inputs:  the workload's view of newest answers, runs, calibrations, macro calibrated_probability_of
-- identifiers: {view}, {latest}, {keys}, {columns}: of probabilities
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
    into name column_name value probability_of
),

entries as (
    select * exclude (probability_of), unnest(map_entries(probability_of)) as entry
    from listed
),

probabilities as (
    select * exclude (entry), entry.key as label, entry.value as probability
    from entries
)

select
    probabilities.*,
    calibrated_probability_of(
        probability,
        calibrations.method,
        calibrations.slope,
        calibrations.intercept,
        calibrations.thresholds,
        calibrations.calibrated
    ) as calibrated_probability
from probabilities
left join runs on runs.run_id = probabilities.run_id
left join calibrations
    on calibrations.workload_digest = runs.workload_digest
    and calibrations.model_digest = runs.model_digest
    and calibrations.column_name = probabilities.column_name
    and calibrations.label = probabilities.label
