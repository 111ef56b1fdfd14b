-- purpose: the file of the database; null for one in memory, no row for one of another format
-- grain:   at most one row
-- inputs:  none
-- parameters: none

select path
from duckdb_databases()
where database_name = current_database() and type = 'duckdb'
