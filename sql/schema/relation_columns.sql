-- purpose: what the database holds
-- grain:   one row a table or view of the current schema
-- inputs:  the catalog
-- parameters: none

select
    columns.table_name as relation_name,
    views.view_oid is not null as is_view,
    list(columns.column_name) as column_names
from duckdb_columns() as columns
left join duckdb_views() as views
    on views.database_oid = columns.database_oid
    and views.view_oid = columns.table_oid
where columns.database_name = current_database() and columns.schema_name = current_schema()
group by all
order by columns.table_name
