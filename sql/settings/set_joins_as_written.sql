-- purpose: keep the sides of joins as written: the right side is built in memory, the left side streams. DuckDB's own
--          choice counts rows, not text lengths, and would hold all texts in memory. Also disable filter pushdown from
--          joins: computing the minimum and maximum of ids that are not UTF-8 fails the query, but such an id must
--          only be an error of its row
-- grain:   a setting of the database, until this process closes it
-- inputs:  none
-- parameters: none

set disabled_optimizers = 'build_side_probe_side,join_filter_pushdown'
