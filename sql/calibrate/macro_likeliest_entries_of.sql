-- purpose: of the entries of `probability_entries_of`, that of the likeliest label; shown: without its label
-- grain:   a scalar; kept in the database, since its views call it
-- inputs:  none
-- parameters: none

create or replace macro likeliest_entries_of
(value double) as case when value is not null then [{label: null::varchar, shown: {probability: value}}] end,
(value map(varchar, double)) as case when list_max(map_values(value)) is not null then [{
    label: map_keys(value)[list_position(map_values(value), list_max(map_values(value)))],
    shown: {probability: list_max(map_values(value))}
}] end
