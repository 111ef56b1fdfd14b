-- purpose: probabilities, and whether gold says that what they are of is so
-- grain:   one row per gold row with an answer of this workload and model; if labels have probabilities, one for each
-- inputs:  batchloom_expected_rows, batchloom_answers, runs, macro probability_entries_of
-- identifiers: {expected}, {answer}, {probability}
-- parameters: $true_label (of a probability without label, the label whose probability it is; null: it is that of true,
--          or of the answer where that is a text), $workload_digest, $model_digest

with listed as (
    select
        expected_rows.request_key,
        expected_rows.{expected}::varchar as expected,
        answers.{answer} as answer,
        unnest(probability_entries_of(answers.{probability})) as entry
    from batchloom_expected_rows as expected_rows
    inner join batchloom_answers as answers on answers.request_key = expected_rows.request_key
    inner join runs on runs.run_id = answers.run_id
    where
        expected_rows.{expected} is not null
        and answers.{probability} is not null
        and runs.workload_digest = $workload_digest
        and runs.model_digest = $model_digest
)

select
    entry.label,
    entry.shown.probability,
    coalesce(
        expected = coalesce(entry.label, $true_label),
        if(typeof(answer) in ('BOOLEAN', 'DOUBLE'), try_cast(expected as boolean), expected = answer::varchar)
    ) as is_right
from listed
order by entry.label, request_key
