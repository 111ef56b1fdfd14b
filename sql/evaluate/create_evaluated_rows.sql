-- purpose: each expected value with the answer; every metric is computed from these rows
-- grain:   one row per evaluation, reference, column and key; for ranks a group of keys
-- inputs:  none
-- parameters: none

create table if not exists evaluated_rows (
    evaluation_id text,
    reference text,            -- 'gold', or the run whose answers are the expected values
    column_name text,          -- of the output table
    kind text,                 -- label, text, number, value, probability, rank
    request_key text[],        -- in the order of the workload's key
    status text,               -- ok, error, unanswered
    expected text,
    answer text,
    is_right boolean,          -- of a probability: whether the event occurred
    confidence double,         -- probability of the answered label, or of the event; null if the workload gives none
    measures map(text, double) -- values whose means are metrics
)
