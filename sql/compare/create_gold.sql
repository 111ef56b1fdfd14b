-- purpose: a copy of gold, with its types
-- grain:   one row a gold row
-- inputs:  none
-- identifiers: {table}, {columns}: each with its type
-- parameters: none

create table {table} ({columns})
