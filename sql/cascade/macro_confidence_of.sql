-- purpose: the probability of the answer that was chosen, by the column that holds the probabilities: of true (a
--          boolean's), logarithms of those of all labels, or those of all labels by their names
-- grain:   a scalar
-- inputs:  none
-- parameters: none

create or replace temp macro confidence_of
(value double) as greatest(value, 1 - value),
(value double[]) as exp(list_max(value)),
(value map(varchar, double)) as list_max(map_values(value))
