-- purpose: rank the answers among themselves, by score, then by key; the ranks of a run's rows in the output table are
--          among the newest answers, which another run may have given
-- grain:   one row per answer that is no error
-- inputs:  batchloom_answers
-- parameters: $group (position in the key of the column within which rows are ranked)

update batchloom_answers
set rank = ranked.rank
from (
    select
        request_key,
        (row_number() over (partition by request_key[$group] order by score desc, request_key))::integer as rank
    from batchloom_answers
    where status = 'ok'
) as ranked
where batchloom_answers.request_key = ranked.request_key
