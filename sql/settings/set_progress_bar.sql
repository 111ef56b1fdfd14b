-- purpose: disable DuckDB's progress bar
-- grain:   a setting of the connection
-- inputs:  none
-- parameters: none

set enable_progress_bar = false
