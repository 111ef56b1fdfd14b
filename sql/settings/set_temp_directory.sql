-- purpose: where DuckDB puts what does not fit its memory limit
-- grain:   a setting of the database, as long as this process has it open
-- inputs:  none
-- parameters: $folder

set temp_directory = $folder
