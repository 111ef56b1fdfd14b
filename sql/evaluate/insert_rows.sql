-- purpose: the compared values of a column of labels, texts, numbers or other values
-- grain:   one row per expected value; where two runs are compared, only if both have answered
-- inputs:  batchloom_pairs, macro words_of
-- parameters: $evaluation_id, $reference, $column, $kind, $right (name of the metric for right answers; empty for none),
--          $is_nullable (whether null is an expected value)

insert into evaluated_rows by name
with texts as (
    select
        request_key,
        status,
        confidence,
        if(typeof(answer) = 'FLOAT', expected::varchar, given) as given, -- no more digits than an answer can have
        expected is not distinct from answer as is_same,
        is_exact,
        typeof(answer) as answer_type,
        coalesce(
            nfc_normalize(decode(encode(expected::varchar), 'replace')),
            case when $kind = 'label' then 'NULL' end
        ) as expected,
        coalesce(
            nfc_normalize(decode(encode(answer::varchar), 'replace')),
            case when $kind = 'label' and status = 'ok' then 'NULL' end
        ) as answer
    from batchloom_pairs
    where (given is not null or $is_nullable) and ($reference = 'gold' or status = 'ok')
),

compared as (
    select
        *,
        status = 'ok' and case $kind
            when 'number' then  -- 1.5 is no integer, and whole numbers beyond 2^53 are not exact as doubles
                try_cast(given as double) is not distinct from try_cast(answer as double)
                and (is_same or answer_type = 'DOUBLE')
            when 'text' then
                regexp_replace(expected, '^[\s\v\p{Z}]+|[\s\v\p{Z}]+$', '', 'g') is not distinct
                from regexp_replace(answer, '^[\s\v\p{Z}]+|[\s\v\p{Z}]+$', '', 'g')
            when 'label' then expected is not distinct from answer
            else is_same and is_exact
        end as is_right,
        list_histogram(words_of(expected)) as expected_words,
        list_histogram(words_of(answer)) as answer_words
    from texts
),

measured as (
    select
        *,
        coalesce(list_sum(map_values(expected_words)), 0) + coalesce(list_sum(map_values(answer_words)), 0) as num_words,
        coalesce(
            list_sum(
                list_transform(
                    map_entries(expected_words),
                    lambda word: least(word.value, coalesce(answer_words[word.key], 0))
                )
            ),
            0
        ) as num_common_words
    from compared
)

select
    $evaluation_id as evaluation_id,
    $reference as reference,
    $column as column_name,
    $kind as kind,
    request_key,
    status,
    case when $kind = 'number' then given else expected end as expected,
    answer,
    case when status <> 'unanswered' then is_right end as is_right,
    confidence,
    map_from_entries(list_filter(
        [
            ('coverage', case when $reference = 'gold' then (status = 'ok')::integer::double end),
            ($right, case when $right <> '' and status <> 'unanswered' then is_right::integer::double end),
            (
                'token_f1',
                case
                    when $kind <> 'text' or status = 'unanswered' then null
                    when num_words = 0 or status = 'error' then is_right::integer::double
                    else 2 * num_common_words / num_words
                end
            ),
            (
                'mean_absolute_error',
                case when $kind = 'number' then abs(try_cast(given as double) - try_cast(answer as double)) end
            )
        ],
        lambda measure: measure[2] is not null
    )) as measures
from measured
