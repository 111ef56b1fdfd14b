-- purpose: forget what a run wrote to a table, before it is written again
-- grain:   the rows of one run
-- inputs:  a table with a run_id
-- identifiers: {table}
-- parameters: $run_id

delete from {table}
where run_id = $run_id
