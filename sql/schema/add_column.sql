-- purpose: a column that a table lacks which an earlier version or an earlier workload file made; its rows have null there
-- grain:   one column
-- inputs:  the table
-- identifiers: {table}, {column}: with its type
-- parameters: none

alter table {table} add column if not exists {column}
