-- purpose: the orders of parts of those rows that are not asked in their workload's order
-- grain:   one row a workload and request key
-- inputs:  none
-- parameters: none

create table if not exists workload_row_layouts (
    workload text,
    template_digest text,          -- of the prompt as the file has it: rows of another one are chosen for anew
    request_key text[],
    part_order text                -- numbers of the parts of the file's template, first to last, from 0: '2,0,1'
)
