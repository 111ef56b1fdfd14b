-- purpose: a probability calibrated by a row of the table calibrations; null if there is none
-- grain:   a scalar; kept in the database, since its views call it
-- inputs:  none
-- parameters: none

create or replace macro calibrated_probability_of(probability, method, slope, intercept, thresholds, calibrated) as
case method
    when 'platt' then
        1 / (1 + exp(-(
            slope * ln(
                least(greatest(probability, 1e-6), 1 - 1e-6) / (1 - least(greatest(probability, 1e-6), 1 - 1e-6))
            ) + intercept
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
end
