-- purpose: delete the rows that a run wrote to a table, before they are written again
-- grain:   the rows of one run
-- inputs:  a table with a run_id
-- identifiers: {table}
-- parameters: $run_id

delete from {table}
where run_id = $run_id
