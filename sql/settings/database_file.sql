-- purpose: the file of the database; null for one in memory
-- grain:   one row
-- inputs:  none
-- parameters: none

select path
from duckdb_databases()
where database_name = current_database()
