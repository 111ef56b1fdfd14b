-- purpose: the columns of the gold rows, and their types
-- grain:   no row
-- inputs:  the table or view $gold, named as in SQL
-- parameters: $gold

select *
from query_table($gold)
limit 0
