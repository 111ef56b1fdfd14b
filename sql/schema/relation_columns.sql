-- purpose: the tables and views of the database, with their columns
-- grain:   one row per table or view of the current schema
-- inputs:  the catalog
-- parameters: none

select
    lower(columns.table_name) as relation_name,
    views.view_oid is not null as is_view,
    map(list(lower(columns.column_name)), list(columns.data_type)) as columns
from duckdb_columns() as columns
left join duckdb_views() as views
    on views.database_oid = columns.database_oid
    and views.view_oid = columns.table_oid
where columns.database_name = current_database() and columns.schema_name = current_schema()
group by all
order by relation_name
