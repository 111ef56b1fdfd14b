-- purpose: the memory that DuckDB may use before it spills to disk
-- grain:   a setting of the database, until this process closes it
-- inputs:  none
-- parameters: $memory_limit, as in '2GB'

set memory_limit = $memory_limit
