-- purpose: from here on SQL cannot change settings
-- grain:   a setting of the database, until this process closes it
-- inputs:  none
-- parameters: none

set lock_configuration = true
