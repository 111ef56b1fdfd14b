-- purpose: timestamps are written and shown in UTC, whatever the machine's zone
-- grain:   a setting of the connection
-- inputs:  none
-- parameters: none

set TimeZone = 'UTC'
