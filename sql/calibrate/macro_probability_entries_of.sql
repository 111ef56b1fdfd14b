-- purpose: the probabilities in a value: one, or one for each label; shown: the columns of a view of calibrated values
-- grain:   a scalar; kept in the database, since its views call it
-- inputs:  none
-- parameters: none

create or replace macro probability_entries_of
(value double) as [{label: null::varchar, shown: {probability: value}}],
(value map(varchar, double)) as list_transform(
    map_entries(value),
    lambda entry: {label: entry.key, shown: {label: entry.key, probability: entry.value}}
)
