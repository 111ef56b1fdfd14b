-- purpose: the columns of a table or view, and their types
-- grain:   one row per column
-- inputs:  the catalog
-- parameters: $relation

select columns.column_name, columns.data_type
from information_schema.columns as columns
where
    columns.table_catalog = current_database()
    and columns.table_schema = current_schema()
    and lower(columns.table_name) = lower($relation)
order by columns.ordinal_position
