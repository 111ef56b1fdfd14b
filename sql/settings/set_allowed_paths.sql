-- purpose: files that SQL may read and write even where it may reach no other file
-- grain:   a setting of the database, as long as this process has it open
-- inputs:  none
-- parameters: $paths (absolute paths)

set allowed_paths = $paths
