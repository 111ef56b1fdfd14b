-- purpose: the newest evaluation of a run's answers
-- grain:   at most one row
-- inputs:  evaluations
-- parameters: $run_id

select
    evaluation_id,
    coalesce('gold table ' || gold, 'run ' || against) as compared_with,
    case when answers = 'newest' then 'newest answers' else 'answers of this run' end as whose,
    strftime(created_at at time zone 'UTC', '%Y-%m-%d %H:%M:%S') as created_at_utc,
    num_gold_rows,
    num_ok,
    num_errors,
    num_unanswered
from evaluations
where run_id = $run_id
order by created_at desc, evaluation_id desc
limit 1
