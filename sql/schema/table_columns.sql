-- purpose: the columns of a table, with their types
-- grain:   no rows
-- inputs:  the table
-- identifiers: {table}
-- parameters: none

from {table}
limit 0
