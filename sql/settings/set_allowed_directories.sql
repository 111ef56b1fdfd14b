-- purpose: folders that SQL may read and write without external access
-- grain:   a setting of the database, until this process closes it
-- inputs:  none
-- parameters: $folders (absolute paths)

set allowed_directories = $folders
