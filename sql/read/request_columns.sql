-- purpose: the columns of a workload's query; fails unless it is one select without parameters
-- grain:   no rows
-- inputs:  what the workload's query reads
-- parameters: $requests_sql (the workload's query)

from query($requests_sql)
limit 0
