-- purpose: each expected value of a column, as the answer's type and whether it lost nothing by that, with the answer.
--          In mode decide, a row whose status is error has the answers of its other questions, and a row may not have
--          been asked each question yet
-- grain:   one row per expected row
-- inputs:  batchloom_expected_rows, batchloom_answers, macro probability_of_answer
-- identifiers: {expected}, {answer}, {probability} (batchloom_no_probability if the workload gives none)
-- parameters: $is_nullable (whether null is an answer), $question (the answer's name)

create or replace temp table batchloom_pairs as
select
    expected_rows.request_key,
    case
        when answers.{answer} is not null then 'ok'
        when not list_contains(
            list_transform(map_keys(answers.question_states), lambda name: lower(name)), lower($question)
        )
            then 'unanswered'
        when answers.status = 'ok' and not $is_nullable then 'unanswered'
        else coalesce(answers.status, 'unanswered')
    end as status,
    decode(encode(expected_rows.{expected}::varchar), 'replace') as given,
    try(cast_to_type(expected_rows.{expected}, answers.{answer})) as expected,
    coalesce(
        try(  -- in lists, since no cast leads to the type of a column without any value
            cast_to_type([cast_to_type(expected_rows.{expected}, answers.{answer})], [expected_rows.{expected}])
            = [expected_rows.{expected}]
        ),
        true
    )
    or typeof(expected_rows.{expected}) = 'VARCHAR' as is_exact,
    answers.{answer} as answer,
    probability_of_answer(answers.{answer}::varchar, answers.{probability}) as confidence
from batchloom_expected_rows as expected_rows
left join batchloom_answers as answers on answers.request_key = expected_rows.request_key
