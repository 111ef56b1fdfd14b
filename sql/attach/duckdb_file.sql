-- purpose: the tables of another duckdb file, under a name, to be read only
-- grain:   an attached database, as long as this process has the database open
-- inputs:  the file
-- identifiers: {name}
-- parameters: $path

attach $path as {name} (type duckdb, read_only)
