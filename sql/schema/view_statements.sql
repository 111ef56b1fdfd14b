-- purpose: the statements that made the views of the database
-- grain:   one row per view of the current schema
-- inputs:  the catalog
-- parameters: none

select views.sql
from duckdb_views() as views
where views.database_name = current_database() and views.schema_name = current_schema() and not views.internal
