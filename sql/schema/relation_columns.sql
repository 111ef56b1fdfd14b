-- purpose: what the database holds
-- grain:   one row a column of a table or view of the current schema
-- inputs:  the catalog
-- parameters: none

select
    columns.table_name as relation_name,
    tables.table_type = 'VIEW' as is_view,
    columns.column_name
from information_schema.columns as columns
inner join information_schema.tables as tables
    on tables.table_catalog = columns.table_catalog
    and tables.table_schema = columns.table_schema
    and tables.table_name = columns.table_name
where columns.table_catalog = current_database() and columns.table_schema = current_schema()
order by columns.table_name, columns.ordinal_position
