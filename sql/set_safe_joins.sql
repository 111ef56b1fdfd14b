-- purpose: joins without filters made of the other side's smallest and largest value: making them ends the whole query
--          on an id with bytes that are not UTF-8, which is to be one row's error
-- grain:   a setting of the database, as long as this process has it open
-- inputs:  none
-- parameters: none

set disabled_optimizers = 'join_filter_pushdown'
