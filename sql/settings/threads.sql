-- purpose: use no more threads than given, and no more than there are: each needs a part of DuckDB's memory limit
-- grain:   of the database in this process, until it is closed
-- inputs:  none
-- parameters: $most

set threads = least(current_setting('threads'), $most)
