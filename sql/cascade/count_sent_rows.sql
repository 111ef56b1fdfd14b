-- purpose: number of rows answered by the first model that go to the second
-- grain:   one row
-- inputs:  batchloom_confidences
-- parameters: $threshold

select count(*) as num_sent
from batchloom_confidences
where is_ok and ($threshold::double is null or confidence < $threshold::double)
