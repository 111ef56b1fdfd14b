-- purpose: share of right answers by confidence
-- grain:   one row per column and tenth of confidence with at least one row
-- inputs:  evaluation_calibration
-- parameters: $evaluation_id

select column_name, tenth, num_rows, mean_confidence, share_right, low, high
from evaluation_calibration
where evaluation_id = $evaluation_id
order by column_name, tenth
