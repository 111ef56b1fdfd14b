-- purpose: the rows of the sample, in a fixed order
-- grain:   one row per key
-- inputs:  batchloom_compared
-- parameters: none

select request_key, confidence, is_same
from batchloom_compared
order by request_key
