-- purpose: of rows that this night has chosen for, what earlier nights have chosen does not count
-- grain:   one row a request key
-- inputs:  batchloom_row_layouts, batchloom_chosen_rows
-- parameters: none

delete from batchloom_row_layouts
where request_key in (select list_value(*columns('^key_.*$')) from batchloom_chosen_rows)
