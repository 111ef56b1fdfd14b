-- purpose: an expected value that the column cannot have
-- grain:   at most one row
-- inputs:  batchloom_pairs
-- parameters: $kind, $labels (empty if any value is allowed)

select request_key, given
from batchloom_pairs as pairs
cross join lateral (select try_cast(pairs.given as double)) as parsed (number)
where
    given is not null
    and case $kind
        when 'number' then not coalesce(isfinite(number), false)
        when 'probability' then len($labels) = 0 and try_cast(given as boolean) is null
        when 'rank' then len($labels) = 0 and not coalesce(isfinite(number) and number >= 0, false)
        when 'label' then expected is null or (len($labels) > 0 and not list_contains($labels, given))
        else expected is null
    end
order by given
limit 1
