-- purpose: from here on SQL reaches no files, network, extensions or Python variables; attached databases stay
-- grain:   a setting of the database, until this process closes it
-- inputs:  none
-- parameters: none

set enable_external_access = false
