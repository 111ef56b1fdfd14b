-- purpose: add rows to a table; columns that they do not name are null
-- grain:   one row per item of $rows
-- inputs:  none
-- identifiers: {table}
-- parameters: $rows (structs with a field for each column)

insert into {table} by name
select unnest(given)
from (select unnest($rows) as given)
