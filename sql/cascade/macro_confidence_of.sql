-- purpose: the probability of the given answer, from the type of the column of probabilities: a boolean's probability of
--          true, the log-probabilities of all labels, or the probabilities of all labels by name
-- grain:   a scalar
-- inputs:  none
-- parameters: none

create or replace temp macro confidence_of
(value double) as greatest(value, 1 - value),
(value double[]) as exp(list_max(value)),
(value map(varchar, double)) as list_max(map_values(value))
