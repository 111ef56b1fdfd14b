-- purpose: the probability of each label, and whether gold says that it is right
-- grain:   one row per label and gold row with an answer of this workload and model
-- inputs:  batchloom_expected_rows, batchloom_answers, runs
-- identifiers: {expected}, {probability}
-- parameters: $true_label (not used), $workload_digest, $model_digest

with listed as (
    select
        expected_rows.request_key,
        expected_rows.{expected}::varchar as expected,
        unnest(map_entries(answers.{probability})) as entry
    from batchloom_expected_rows as expected_rows
    inner join batchloom_answers as answers on answers.request_key = expected_rows.request_key
    inner join runs on runs.run_id = answers.run_id
    where
        answers.status = 'ok'
        and expected_rows.{expected} is not null
        and runs.workload_digest = $workload_digest
        and runs.model_digest = $model_digest
        and $true_label is null
)

select entry.key as label, entry.value::double as probability, entry.key = expected as is_right
from listed
order by label, request_key
