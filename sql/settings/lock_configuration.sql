-- purpose: SQL changes no setting from here on
-- grain:   a setting of the database, as long as this process has it open
-- inputs:  none
-- parameters: none

set lock_configuration = true
