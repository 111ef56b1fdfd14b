-- purpose: add one answer to a workload's table
-- grain:   one row
-- inputs:  none
-- identifiers: {table}, {columns}
-- parameters: $values (a struct with the fields in the order of {columns})

insert into {table} ({columns})
select unnest($values)
