-- purpose: rows that both models answer: a random sample that stays the same from night to night where rows do
-- grain:   one row a key
-- inputs:  batchloom_confidences
-- parameters: $salt, $num_sampled

create or replace temp table batchloom_chosen_rows as
select request_key
from batchloom_confidences
where is_ok
order by sha256($salt || request_key::varchar), request_key
limit $num_sampled
