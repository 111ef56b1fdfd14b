-- purpose: which rows are asked in an order of their own, and of the workload in that order the digest and the places
--          of its fields among the workload's, from 1
-- grain:   one row a request key; none until rows are put in
-- inputs:  none
-- parameters: none

create or replace temp table batchloom_row_layouts (
    request_key varchar[],
    part_order varchar,
    digest varchar,
    places bigint[]
)
