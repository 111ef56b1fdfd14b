-- purpose: fill the copy of gold
-- grain:   one row a gold row
-- inputs:  gold_rows
-- identifiers: {table}
-- parameters: none

insert into {table}
select *
from gold_rows
