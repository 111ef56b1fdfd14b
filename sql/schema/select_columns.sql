-- purpose: the types that columns of a table have; no row is read
-- grain:   none
-- inputs:  a workload's output table
-- identifiers: {columns}, {table}
-- parameters: none

select {columns}
from {table}
limit 0
