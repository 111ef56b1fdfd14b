-- purpose: detach a database, which other connections to the same file would see until all of them are closed
-- grain:   none
-- inputs:  the attached database
-- identifiers: {name}
-- parameters: none

detach {name}
