-- purpose: everything that was committed is in the database file itself, nothing left in its write-ahead log
-- grain:   none
-- inputs:  the database
-- parameters: none

checkpoint
