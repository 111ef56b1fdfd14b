-- purpose: move committed data from the write-ahead log to the database file
-- grain:   none
-- inputs:  the database
-- parameters: none

checkpoint
