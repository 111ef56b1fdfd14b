-- purpose: of two sides of an outer join the right one is kept in memory and the left one streams past, as written: by
--          DuckDB's choice of sides, which sees numbers of rows but not that texts are long, all texts would be kept;
--          and no filters made of a side's smallest and largest value: making them ends the whole query on an id with
--          bytes that are not UTF-8, which is to be one row's error
-- grain:   a setting of the database, as long as this process has it open
-- inputs:  none
-- parameters: none

set disabled_optimizers = 'build_side_probe_side,join_filter_pushdown'
