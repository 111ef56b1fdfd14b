-- purpose: the rows of the sample, and whether both models agree; no answer of the second is a disagreement
-- grain:   one row per key, in a fixed order
-- inputs:  batchloom_chosen_rows, batchloom_confidences, batchloom_second_answers
-- identifiers: {keys}
-- parameters: $answers (columns)

with texts as (
    select [{keys}] as request_key, status, (columns($answers))::varchar as 'answer_\0'
    from batchloom_second_answers
),

second as (
    select
        request_key,
        bool_and(status = 'ok') as is_ok,
        any_value(list_value(*columns('^answer_.*$'))) as answers
    from texts
    group by request_key
)

select
    first.request_key,
    first.confidence,
    coalesce(second.is_ok and first.answers = second.answers, false) as is_same
from batchloom_confidences as first
semi join batchloom_chosen_rows on batchloom_chosen_rows.request_key = first.request_key
left join second on second.request_key = first.request_key
order by first.request_key
