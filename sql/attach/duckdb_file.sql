-- purpose: attach another duckdb file read-only under a name
-- grain:   an attached database, until this process closes the database
-- inputs:  the file
-- identifiers: {name}
-- parameters: $path

attach $path as {name} (type duckdb, read_only)
