-- purpose: why rows of a run have no answer; reasons are grouped without their quoted texts and numbers
-- grain:   one row per reason, most frequent first, at most $num_rows
-- inputs:  the workload's output table
-- identifiers: {table}
-- parameters: $run_id, $num_rows

with reasons as (
    select
        regexp_replace(regexp_replace(error, '(^|[\s(,=])''.*''', '\1…', 'gs'), '\d[\d,.]*', '#', 'g') as reason,
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
