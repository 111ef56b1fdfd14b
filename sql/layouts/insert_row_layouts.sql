-- purpose: store the orders of rows that have another one than their workload
-- grain:   one row per request key; rows with equal keys get one order
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
