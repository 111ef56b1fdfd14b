-- purpose: the folder to which DuckDB spills what exceeds its memory limit
-- grain:   a setting of the database, until this process closes it
-- inputs:  none
-- parameters: $folder

set temp_directory = $folder
