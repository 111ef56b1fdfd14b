-- purpose: no files, no network, no extensions, no variables of Python from here on; what is attached stays
-- grain:   a setting of the database, as long as this process has it open
-- inputs:  none
-- parameters: none

set enable_external_access = false
