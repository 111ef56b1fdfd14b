-- purpose: store a certificate unless it is stored already
-- grain:   at most one row
-- inputs:  batchloom_compared
-- parameters: $certificate (a struct with a field for each column but the sample)

insert into certificates by name
select
    unnest($certificate),
    (
        select list(
            {request_key: request_key, confidence: confidence, is_same: is_same} order by request_key
        )
        from batchloom_compared
    ) as sample
where not exists (select 1 from certificates where certificate_id = ($certificate).certificate_id)
