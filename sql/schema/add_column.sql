-- purpose: a column for the answers to a question that is new in a workload; rows of earlier runs have null there
-- grain:   one column
-- inputs:  the table
-- identifiers: {table}, {column}: with its type
-- parameters: none

alter table {table} add column if not exists {column}
