-- purpose: attach another DuckDB or SQLite file read-only under a name
-- grain:   an attached database, until this process closes the database
-- inputs:  the file
-- identifiers: {name}
-- parameters: $path

attach $path as {name} (read_only)
