-- purpose: the rows of a CSV file under the name of the file; read anew each time
-- grain:   a view
-- inputs:  the file, whose path as a text literal stands where <path> is
-- identifiers: {name}, {file}
-- parameters: none

create or replace view {name}.{file} as from read_csv(<path>)
