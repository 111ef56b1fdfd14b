-- purpose: the columns of gold rows or answers, and their types
-- grain:   no row
-- inputs:  the table or view $gold, named as in SQL
-- parameters: $gold

select *
from query_table($gold)
limit 0
