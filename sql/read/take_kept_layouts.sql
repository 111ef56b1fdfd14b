-- purpose: take the stored orders that earlier nights chose for rows
-- grain:   one row per request key
-- inputs:  workload_row_layouts
-- parameters: $workload, $template_digest, $orders, $digests and $places (one each per order)

insert into batchloom_row_layouts by name
select
    request_key,
    part_order,
    ($digests)[list_position($orders, part_order)] as digest,
    ($places)[list_position($orders, part_order)] as places
from workload_row_layouts
where workload = $workload and template_digest = $template_digest
