-- purpose: the output tables of all workloads
-- grain:   one row per table with the columns that every output table has
-- inputs:  the catalog
-- parameters: none

select columns.table_name
from information_schema.columns as columns
inner join information_schema.tables as tables
    on tables.table_catalog = columns.table_catalog
    and tables.table_schema = columns.table_schema
    and tables.table_name = columns.table_name
where columns.table_catalog = current_database()
    and columns.table_schema = current_schema()
    and tables.table_type = 'BASE TABLE'
    and columns.column_name in (
        'status', 'error', 'finish_reason', 'num_prompt_tokens', 'num_cached_tokens', 'num_output_tokens', 'run_id',
        'content_key'
    )
group by columns.table_name
having count(*) = 8
order by columns.table_name
