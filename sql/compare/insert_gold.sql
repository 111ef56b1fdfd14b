-- purpose: fill the copy of the gold rows
-- grain:   one row per gold row
-- inputs:  gold_rows
-- identifiers: {table}
-- parameters: none

insert into {table}
select *
from gold_rows
