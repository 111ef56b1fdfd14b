-- purpose: how many values of a column are judged
-- grain:   one row
-- inputs:  batchloom_pairs
-- parameters: none

select count(given) as num_values
from batchloom_pairs
