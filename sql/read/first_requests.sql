-- purpose: the first rows of a workload's query, to be run as its query
-- grain:   one row per row of the workload's query
-- inputs:  where <requests_sql> stands, that query as a string literal; where <num_rows> stands, the most rows
-- parameters: none

from query(<requests_sql>) limit <num_rows>
