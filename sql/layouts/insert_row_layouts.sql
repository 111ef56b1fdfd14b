-- purpose: keep the orders of rows that are not asked in their workload's order
-- grain:   one row a request key; rows of equal keys are asked in one order
-- inputs:  chosen_rows
-- parameters: $workload, $template_digest

insert into workload_row_layouts by name
select
    $workload as workload,
    $template_digest as template_digest,
    list_value(*columns('^key_.*$')) as request_key,
    min(part_order) as part_order
from chosen_rows
group by request_key
having min(part_order) is not null
