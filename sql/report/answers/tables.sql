-- purpose: the output tables by their names as written, which statements take: DuckDB ignores the case of ASCII letters only
-- grain:   one row per table of the current schema
-- inputs:  the catalog
-- parameters: $columns, in lower case, which every output table has

select table_name
from duckdb_tables() as tables
where
    database_name = current_database()
    and schema_name = current_schema()
    and (
        select count(*)
        from duckdb_columns() as columns
        where columns.table_oid = tables.table_oid and columns.database_oid = tables.database_oid
            and list_contains($columns, lower(columns.column_name))
    ) = len($columns)
order by table_name
