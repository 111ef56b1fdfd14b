-- purpose: the gold rows
-- grain:   one row per gold row
-- inputs:  the table of gold rows
-- identifiers: {gold}
-- parameters: none

select *
from {gold}
