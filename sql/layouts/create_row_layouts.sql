-- purpose: the order of parts of each row that has another one than its workload
-- grain:   one row per workload and request key
-- inputs:  none
-- parameters: none

create table if not exists workload_row_layouts (
    workload text,
    template_digest text,          -- of the prompt as the file has it; another prompt needs another choice
    request_key text[],
    part_order text                -- numbers of the template's parts, from 0, in the chosen order: '2,0,1'
)
