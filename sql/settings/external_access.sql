-- purpose: what SQL may reach outside the database
-- grain:   one row
-- inputs:  none
-- parameters: none

select
    current_setting('enable_external_access') as has_external_access,
    current_setting('allowed_directories') as allowed_directories
