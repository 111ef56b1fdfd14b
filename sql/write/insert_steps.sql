-- purpose: insert the step records of a run; columns that an earlier version did not write are null
-- grain:   one row per step
-- inputs:  the run's step artifacts, whose columns are those of the table, without run_id
-- parameters: $steps (paths), $run_id

insert into steps by name
select $run_id as run_id, *
from read_parquet($steps, union_by_name = true)
