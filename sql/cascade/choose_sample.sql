-- purpose: the rows that both models answer: a random sample, the same each night if the rows are the same
-- grain:   one row per key
-- inputs:  batchloom_confidences
-- parameters: $salt, $num_sampled

create or replace temp table batchloom_chosen_rows as
select request_key
from batchloom_confidences
where is_ok
order by sha256($salt || request_key::varchar), request_key
limit $num_sampled
