-- purpose: rows in the order of some of their columns, and in that of arrival where these are equal
-- grain:   one row a row of arriving
-- inputs:  arriving, Arrow batches whose column arrival counts their rows
-- parameters: none
-- identifiers: {by}

select * exclude (arrival)
from arriving
order by {by}, arrival
