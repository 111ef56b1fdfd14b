-- purpose: what is answered already: the content keys of each row's newest run, their number, whether it settled them,
--          and where each row is asked several questions, the digests of those that are settled, by an answer or because
--          no prompt fits the model. What has finish_reason 'error' is tried again; an error row with 'length' would only
--          be cut again. settled is null for a row that cannot be asked at all
-- grain:   one row per request key and content key
-- inputs:  the workload's output table
-- identifiers: {table}, {keys}
-- parameters: none

create or replace temp table batchloom_newest_answers as
with newest as (
    select [{keys}] as request_key, content_key, status, finish_reason, question_states
    from (
        from {table}
        union all by name -- of workloads that ask a row several questions
        select null::map(varchar, struct(digest varchar, finish_reason varchar, error varchar)) as question_states
        where false
    )
    qualify rank() over (partition by {keys} order by created_at desc, run_id desc) = 1
)

select
    request_key,
    content_key,
    count(*) over (partition by request_key) as num_contents,
    bool_or(status = 'ok' or finish_reason in ('invalid', 'length') or question_states is not null) as is_settled,
    any_value(
        list_transform(
            list_filter(map_values(question_states), lambda state: state.finish_reason <> 'error'),
            lambda state: state.digest
        )
    ) as settled
from newest
group by request_key, content_key
