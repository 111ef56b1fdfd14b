-- purpose: a missing extension is an error, not a download
-- grain:   a setting of the database, as long as this process has it open
-- inputs:  none
-- parameters: none

set autoinstall_known_extensions = false
