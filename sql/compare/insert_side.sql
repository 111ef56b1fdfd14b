-- purpose: one answer
-- grain:   one row
-- inputs:  none
-- identifiers: {table}, {columns}
-- parameters: $values (a struct with the fields in the order of {columns})

insert into {table} ({columns})
select unnest($values)
