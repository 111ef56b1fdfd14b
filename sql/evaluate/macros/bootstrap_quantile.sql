-- purpose: a quantile of a metric over the replicates of a bootstrap; null if its rows, those of replicate 0, are too few
-- grain:   a scalar, of an aggregation
-- inputs:  none
-- parameters: none

create or replace temp macro bootstrap_quantile(value, replicate, num_rows, fewest_rows, share) as case
    when any_value(num_rows) filter (replicate = 0) >= fewest_rows
        then quantile_cont(value, share) filter (replicate > 0)
end
