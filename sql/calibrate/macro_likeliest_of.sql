-- purpose: the likeliest label and its probability; where there is one probability, that one, without a label
-- grain:   a scalar; kept in the database, since its views call it
-- inputs:  none
-- parameters: none

create or replace macro likeliest_of
(value double) as {label: null::varchar, probability: value},
(value map(varchar, double)) as {
    label: map_keys(value)[list_position(map_values(value), list_max(map_values(value)))],
    probability: list_max(map_values(value))
}
