-- purpose: the orders that this night has chosen for rows, before they are kept
-- grain:   one row a request key; rows of equal keys are asked in one order
-- inputs:  batchloom_chosen_rows
-- parameters: $orders, $digests and $places (of the workload in each of the orders)

insert into batchloom_row_layouts by name
select
    list_value(*columns('^key_.*$')) as request_key,
    min(chosen.part_order) as part_order,
    ($digests)[list_position($orders, min(chosen.part_order))] as digest,
    ($places)[list_position($orders, min(chosen.part_order))] as places
from batchloom_chosen_rows as chosen
group by request_key
having min(chosen.part_order) is not null
