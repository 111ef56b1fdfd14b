-- purpose: a quantile of a metric over the replicates of a bootstrap; null if its rows, those of replicate 0, are too
--          few, or all replicates are equal, which does not mean that the metric is certain
-- grain:   a scalar, of an aggregation
-- inputs:  none
-- parameters: none

create or replace temp macro bootstrap_quantile(value, replicate, num_rows, fewest_rows, share) as case
    when
        any_value(num_rows) filter (replicate = 0) >= fewest_rows
        and max(value) filter (replicate > 0) - min(value) filter (replicate > 0) > 1e-9
        then quantile_cont(value, share) filter (replicate > 0)
end
