-- purpose: no bar of DuckDB's own on the terminal or in a log
-- grain:   a setting of the connection
-- inputs:  none
-- parameters: none

set enable_progress_bar = false
