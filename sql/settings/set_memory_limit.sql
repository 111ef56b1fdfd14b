-- purpose: what DuckDB may hold in memory before it spills to disk
-- grain:   a setting of the database, as long as this process has it open
-- inputs:  none
-- parameters: $memory_limit, as in '2GB'

set memory_limit = $memory_limit
