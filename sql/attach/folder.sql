-- purpose: a place for the views of a folder's files, in memory
-- grain:   an attached database, as long as this process has the database open
-- inputs:  none
-- identifiers: {name}
-- parameters: none

attach ':memory:' as {name} (read_write)
