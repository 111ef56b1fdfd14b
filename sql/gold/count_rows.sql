-- purpose: number of rows
-- grain:   one row
-- inputs:  a table
-- identifiers: {table}
-- parameters: none

select count(*) as num_rows
from {table}
