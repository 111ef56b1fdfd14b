-- purpose: an expected value of a kind that the column cannot have
-- grain:   at most one row
-- inputs:  pairs
-- parameters: $kind, $labels (empty where any will do)

select given
from pairs
where
    given is not null
    and case $kind
        when 'number' then try_cast(given as double) is null
        when 'probability' then len($labels) = 0 and try_cast(given as boolean) is null
        when 'rank' then len($labels) = 0 and coalesce(try_cast(given as double), -1) < 0
        when 'label' then expected is null or (len($labels) > 0 and not list_contains($labels, given))
        else expected is null
    end
order by given
limit 1
