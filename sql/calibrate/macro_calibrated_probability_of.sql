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
                list_transform(
                    [len(list_filter(thresholds, lambda x: x <= probability))],
                    lambda i:
                        calibrated[i] + (probability - thresholds[i])
                        / (thresholds[i + 1] - thresholds[i]) * (calibrated[i + 1] - calibrated[i])
                )[1]
        end
end
