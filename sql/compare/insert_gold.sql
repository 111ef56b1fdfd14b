-- purpose: fill the copy of the gold rows
-- grain:   one row per gold row
-- inputs:  gold_rows
-- parameters: none

insert into batchloom_gold
select *
from gold_rows
