-- purpose: whether a table has answers of a run
-- grain:   one row
-- inputs:  an output table
-- identifiers: {table}
-- parameters: $run_id

select exists (from {table} where run_id = $run_id) as has_answers
