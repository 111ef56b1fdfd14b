-- purpose: each expected value of a column, as the answer's type, with the answer
-- grain:   one row per expected row
-- inputs:  expected_rows, answers, macro confidence_of
-- identifiers: {expected}, {answer}, {probability} (no_probability if the workload gives none)
-- parameters: none

create or replace temp table pairs as
select
    expected_rows.request_key,
    coalesce(answers.status, 'unanswered') as status,
    decode(encode(expected_rows.{expected}::varchar), 'replace') as given,
    try(cast_to_type(expected_rows.{expected}, answers.{answer})) as expected,
    case when answers.status = 'ok' then answers.{answer} end as answer,
    case
        when answers.status = 'ok' then confidence_of(answers.{answer}::varchar, answers.{probability})
    end as confidence
from expected_rows
left join answers on answers.request_key = expected_rows.request_key
