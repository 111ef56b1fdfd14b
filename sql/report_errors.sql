-- purpose: why rows of a run have no answer; texts in quotes and numbers are left out of a reason, so that like goes to like
-- grain:   one row a reason, most frequent first, at most $num_rows
-- inputs:  the workload's output table
-- identifiers: {table}
-- parameters: $run_id, $num_rows

with reasons as (
    select
        regexp_replace(regexp_replace(error, '''[^'']*''', '…', 'g'), '\d[\d,.]*', '#', 'g') as reason,
        finish_reason,
        error
    from {table}
    where run_id = $run_id and status = 'error'
)

select reason, finish_reason, count(*) as num_rows, min(error) as example
from reasons
group by reason, finish_reason
order by num_rows desc, reason, finish_reason
limit $num_rows
