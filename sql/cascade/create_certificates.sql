-- purpose: what samples have shown of cascades
-- grain:   one row a sample and target
-- inputs:  none
-- parameters: none

create table if not exists certificates (
    certificate_id text,       -- sha256 of all but created_at
    workload text,
    workload_digest text,
    first_model_digest text,   -- answers every row
    second_model_digest text,  -- answers the rows that the first is unsure of
    target_agreement double,   -- share of the rows outside the sample that have the answer of the second model
    confidence double,         -- with which it is met
    num_rows bigint,           -- with an answer of the first model, when the sample was drawn
    num_sampled bigint,        -- of these, answered by both
    num_agreed bigint,         -- of these, with the same answer of both
    threshold double,          -- rows below it go to the second model; null: all do
    num_allowed bigint,        -- the bound: more rows with another answer than the second model's were rejected
    num_acceptable bigint,     -- in the sample, at most: that many still show the bound; null: none would
    num_disagreed bigint,      -- in the sample, from the threshold on
    sample_agreement double,   -- realised: share of the sample in which the cascade's answer is the second model's
    num_sent bigint,           -- rows below the threshold
    reason text,               -- why all rows go to the second model; null where they do not
    sample struct(request_key varchar[], confidence double, is_same boolean)[],
    created_at timestamptz
)
