-- purpose: delete the orders of earlier nights for rows that got one this night
-- grain:   one row per request key
-- inputs:  batchloom_row_layouts, batchloom_chosen_rows
-- parameters: none

delete from batchloom_row_layouts
where request_key in (select list_value(*columns('^key_.*$')) from batchloom_chosen_rows)
