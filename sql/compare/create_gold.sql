-- purpose: a table for a copy of the gold rows, with the same types
-- grain:   one row per gold row
-- inputs:  none
-- identifiers: {columns}: each with its type
-- parameters: none

create table batchloom_gold ({columns})
