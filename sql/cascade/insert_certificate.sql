-- purpose: store a certificate unless it is stored already
-- grain:   at most one row
-- inputs:  batchloom_compared
-- parameters: as the columns, without the sample and what is computed from it

insert into certificates by name
select
    $certificate_id as certificate_id,
    $workload as workload,
    $workload_digest as workload_digest,
    $first_model_digest as first_model_digest,
    $second_model_digest as second_model_digest,
    $target_agreement as target_agreement,
    $confidence as confidence,
    $num_rows as num_rows,
    $num_sampled as num_sampled,
    $num_agreed as num_agreed,
    $threshold as threshold,
    $num_allowed as num_allowed,
    $num_acceptable as num_acceptable,
    $num_disagreed as num_disagreed,
    1 - $num_disagreed / nullif($num_sampled, 0) as sample_agreement,
    $num_sent as num_sent,
    nullif($reason, '') as reason,
    (
        select list(
            {request_key: request_key, confidence: confidence, is_same: is_same} order by request_key
        )
        from batchloom_compared
    ) as sample,
    $created_at::timestamptz as created_at
where not exists (select 1 from certificates where certificate_id = $certificate_id)
