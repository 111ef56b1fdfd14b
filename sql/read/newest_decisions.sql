-- purpose: what is answered already if each row is asked several questions: for the content keys of each row's newest
--          run, their number and the digests of the questions that are settled, by an answer or because no prompt fits
--          the model. A question with finish_reason 'error' is tried again. Null for a row that cannot be asked at
--          all. Nothing is settled in a row that has neither
-- grain:   one row per request key and content key
-- inputs:  the workload's output table
-- identifiers: {table}, {keys}
-- parameters: none

create or replace temp table batchloom_newest_answers as
with newest as (
    select [{keys}] as request_key, content_key, finish_reason, question_states
    from {table}
    qualify rank() over (partition by {keys} order by created_at desc, run_id desc) = 1
)

select
    request_key,
    content_key,
    count(*) over (partition by request_key) as num_contents,
    bool_or(question_states is not null or finish_reason = 'invalid') as is_settled,
    any_value(
        list_transform(
            list_filter(map_values(question_states), lambda state: state.finish_reason <> 'error'),
            lambda state: state.digest
        )
    ) as settled
from newest
group by request_key, content_key
