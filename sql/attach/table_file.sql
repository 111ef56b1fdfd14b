-- purpose: a view of a CSV, JSON or Parquet file, named after the file, which is read at each query
-- grain:   a view
-- inputs:  the file, whose path as a text literal stands where <path> is
-- identifiers: {name}, {file}
-- parameters: none

create view {name}.{file} as from <path>
