-- purpose: each expected value of a column, as the answer's type, with the answer
-- grain:   one row per expected row
-- inputs:  batchloom_expected_rows, batchloom_answers, macro probability_of_answer
-- identifiers: {expected}, {answer}, {probability} (batchloom_no_probability if the workload gives none)
-- parameters: none

create or replace temp table batchloom_pairs as
select
    expected_rows.request_key,
    coalesce(answers.status, 'unanswered') as status,
    decode(encode(expected_rows.{expected}::varchar), 'replace') as given,
    try(cast_to_type(expected_rows.{expected}, answers.{answer})) as expected,
    case when answers.status = 'ok' then answers.{answer} end as answer,
    case
        when answers.status = 'ok' then probability_of_answer(answers.{answer}::varchar, answers.{probability})
    end as confidence
from batchloom_expected_rows as expected_rows
left join batchloom_answers as answers on answers.request_key = expected_rows.request_key
