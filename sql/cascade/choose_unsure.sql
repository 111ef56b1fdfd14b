-- purpose: rows that the first model failed on or answered with a confidence below $threshold; all if it is null
-- grain:   one row per key
-- inputs:  batchloom_confidences
-- parameters: $threshold

create or replace temp table batchloom_chosen_rows as
select request_key
from batchloom_confidences
where not is_ok or $threshold::double is null or confidence < $threshold::double
