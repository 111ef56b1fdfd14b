-- purpose: lower end of Wilson's 95% confidence interval of a share
-- grain:   a scalar; kept in the database, since a view calls it
-- inputs:  none
-- parameters: none

create or replace macro batchloom_wilson_low(num_hits, num_rows) as greatest(
    0,
    (num_hits + 1.9208 - 1.96 * sqrt(num_hits * (num_rows - num_hits) / num_rows + 0.9604)) / (num_rows + 3.8416)
)
