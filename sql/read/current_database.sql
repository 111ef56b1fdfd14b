-- purpose: the name under which the database's own tables are found where others are attached
-- grain:   one row
-- inputs:  none
-- parameters: none

select current_database() as database_name
