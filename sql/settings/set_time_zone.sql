-- purpose: write and show timestamps in UTC, independent of the machine's time zone
-- grain:   a setting of the connection
-- inputs:  none
-- parameters: none

set TimeZone = 'UTC'
