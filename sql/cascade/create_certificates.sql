-- purpose: what the samples of cascades have shown
-- grain:   one row per sample and target
-- inputs:  none
-- parameters: none

create table if not exists certificates (
    certificate_id text,       -- sha256 of all but created_at
    workload text,
    workload_digest text,
    first_model_digest text,   -- answers every row
    second_model_digest text,  -- answers the rows that the first is unsure of
    target_agreement double,   -- wanted share of the rows outside the sample with the second model's answer
    confidence double,         -- probability with which the target is met
    num_rows bigint,           -- answered by the first model when the sample was drawn
    num_sampled bigint,        -- of these, answered by both models
    num_agreed bigint,         -- of these, with the same answer of both
    threshold double,          -- rows with a confidence below it go to the second model; null: all rows do
    num_allowed bigint,        -- bound on rows outside the sample with another answer than the second model's
    num_acceptable bigint,     -- most disagreements in the sample that still prove the bound; null: no number would
    num_disagreed bigint,      -- disagreements in the sample, from the threshold on
    sample_agreement double,   -- share of the sample in which the cascade's answer is the second model's
    num_sent bigint,           -- rows with a confidence below the threshold
    reason text,               -- why all rows go to the second model; null if they do not
    sample struct(request_key varchar[], confidence double, is_same boolean)[],
    created_at timestamptz
)
