-- purpose: rows sorted by some columns, equal rows in their order of arrival
-- grain:   one row per row of arriving
-- inputs:  arriving: Arrow batches whose column arrival numbers the rows
-- parameters: none
-- identifiers: {by}

select * exclude (arrival)
from arriving
order by {by}, arrival
