-- purpose: rows that the first model failed on, or whose answer has too low a probability; all where $threshold is null
-- grain:   one row a key
-- inputs:  batchloom_confidences
-- parameters: $threshold

create or replace temp table batchloom_chosen_rows as
select request_key
from batchloom_confidences
where not is_ok or $threshold::double is null or confidence < $threshold::double
