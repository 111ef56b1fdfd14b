-- purpose: the keys of the gold rows
-- grain:   one row per gold row
-- inputs:  batchloom_expected_rows
-- parameters: none

select request_key
from batchloom_expected_rows
