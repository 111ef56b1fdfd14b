-- purpose: a column that a table made by an earlier version lacks; its rows have null there
-- grain:   one column
-- inputs:  the table
-- identifiers: {table}, {column}
-- parameters: none

alter table {table} add column if not exists {column json}
