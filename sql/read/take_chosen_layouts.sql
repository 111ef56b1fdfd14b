-- purpose: take the orders that this night chose for rows, before they are stored
-- grain:   one row per request key; rows with equal keys get one order
-- inputs:  batchloom_chosen_rows
-- parameters: $orders, $digests and $places (one each per order)

insert into batchloom_row_layouts by name
select
    list_value(*columns('^key_.*$')) as request_key,
    min(chosen.part_order) as part_order,
    ($digests)[list_position($orders, min(chosen.part_order))] as digest,
    ($places)[list_position($orders, min(chosen.part_order))] as places
from batchloom_chosen_rows as chosen
group by request_key
having min(chosen.part_order) is not null
