-- purpose: the rows of the sample in an order that is always the same
-- grain:   one row a key
-- inputs:  batchloom_compared
-- parameters: none

select request_key, confidence, is_same
from batchloom_compared
order by request_key
