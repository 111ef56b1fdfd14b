-- purpose: drop a table, such as an empty input table, so that the attached one with this name is found
-- grain:   none
-- inputs:  the table
-- identifiers: {table}
-- parameters: none

drop table {table}
