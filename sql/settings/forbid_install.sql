-- purpose: a missing extension is an error instead of a download
-- grain:   a setting of the database, until this process closes it
-- inputs:  none
-- parameters: none

set autoinstall_known_extensions = false
