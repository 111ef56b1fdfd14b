-- purpose: take away an empty input table where the real one is to be found
-- grain:   none
-- inputs:  the table
-- identifiers: {table}
-- parameters: none

drop table {table}
