-- purpose: the database's name in the catalog, needed if others are attached, and its schemas
-- grain:   one row per schema
-- inputs:  the catalog
-- parameters: none

select
    database_name,
    schema_name
from duckdb_schemas()
where database_name = current_database()
order by schema_name <> 'main', schema_name
