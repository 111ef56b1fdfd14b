-- purpose: change a setting of DuckDB
-- grain:   of the database or the connection, as DuckDB documents it, until the process closes it
-- inputs:  none
-- identifiers: {setting}
-- parameters: $value

set {setting} = $value
