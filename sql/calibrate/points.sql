-- purpose: probabilities of an event, and whether gold says that it occurred
-- grain:   one row per gold row with an answer of this workload and model
-- inputs:  batchloom_expected_rows, batchloom_answers, runs
-- identifiers: {expected}, {probability}
-- parameters: $true_label (the label whose probability it is; null: of true), $workload_digest, $model_digest

select
    null::varchar as label,
    answers.{probability}::double as probability,
    coalesce(
        expected_rows.{expected}::varchar = $true_label, try_cast(expected_rows.{expected}::varchar as boolean)
    ) as is_right
from batchloom_expected_rows as expected_rows
inner join batchloom_answers as answers on answers.request_key = expected_rows.request_key
inner join runs on runs.run_id = answers.run_id
where
    answers.status = 'ok'
    and expected_rows.{expected} is not null
    and answers.{probability} is not null
    and runs.workload_digest = $workload_digest
    and runs.model_digest = $model_digest
order by expected_rows.request_key
