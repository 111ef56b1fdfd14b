-- purpose: the newest probabilities beside their calibrated values; null where no map was fitted for the workload and the
--          model that gave them
-- grain:   one row a key, column of probabilities and label
-- inputs:  the workload's view of newest answers, runs, calibrations
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
    case calibrations.method
        when 'platt' then
            1 / (1 + exp(-(
                calibrations.slope * ln(
                    least(greatest(probability, 1e-6), 1 - 1e-6) / (1 - least(greatest(probability, 1e-6), 1 - 1e-6))
                ) + calibrations.intercept
            )))
        when 'isotonic' then
            case
                when probability <= thresholds[1] then calibrated[1]
                when probability >= thresholds[-1] then calibrated[-1]
                else
                    calibrated[len(list_filter(thresholds, lambda x: x <= probability))]
                    + (probability - thresholds[len(list_filter(thresholds, lambda x: x <= probability))])
                    / (
                        thresholds[len(list_filter(thresholds, lambda x: x <= probability)) + 1]
                        - thresholds[len(list_filter(thresholds, lambda x: x <= probability))]
                    )
                    * (
                        calibrated[len(list_filter(thresholds, lambda x: x <= probability)) + 1]
                        - calibrated[len(list_filter(thresholds, lambda x: x <= probability))]
                    )
            end
    end as calibrated_probability
from probabilities
left join runs on runs.run_id = probabilities.run_id
left join calibrations
    on calibrations.workload_digest = runs.workload_digest
    and calibrations.model_digest = runs.model_digest
    and calibrations.column_name = probabilities.column_name
    and calibrations.label = probabilities.label
