-- purpose: an in-memory database for the views of a folder's files
-- grain:   an attached database, until this process closes the database
-- inputs:  none
-- identifiers: {name}
-- parameters: none

attach ':memory:' as {name} (read_write)
