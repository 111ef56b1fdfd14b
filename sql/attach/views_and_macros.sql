-- purpose: what a query may read by the name of a view or macro
-- grain:   one row per view or macro of the database, with its definition
-- inputs:  the catalog
-- parameters: none

select
    view_name as called,
    sql as definition
from duckdb_views()
where database_name = current_database() and not internal
union all
select
    function_name as called,
    macro_definition as definition
from duckdb_functions()
where database_name = current_database() and not internal and macro_definition is not null
