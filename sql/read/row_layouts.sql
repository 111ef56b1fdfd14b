-- purpose: the rows with an order of parts of their own: the digest of the workload in that order, and the positions of
--          its fields among the workload's, from 1
-- grain:   one row per request key; empty at first
-- inputs:  none
-- parameters: none

create or replace temp table batchloom_row_layouts (
    request_key varchar[],
    part_order varchar,
    digest varchar,
    places bigint[]
)
