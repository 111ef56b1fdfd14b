-- purpose: add a column to a table made by an earlier version or workload file; existing rows get null
-- grain:   one column
-- inputs:  the table
-- identifiers: {table}, {column}: with its type
-- parameters: none

alter table {table} add column if not exists {column}
