-- purpose: the gold rows
-- grain:   one row per gold row
-- inputs:  the table or view $gold, named as in SQL
-- parameters: $gold

select *
from query_table($gold)
