-- purpose: the catalog name of the database, needed if others are attached
-- grain:   one row
-- inputs:  none
-- parameters: none

select current_database() as database_name
