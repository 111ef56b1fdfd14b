-- purpose: which answers were compared with what
-- grain:   one row an evaluation
-- inputs:  none
-- parameters: none

create table if not exists evaluations (
    evaluation_id text,
    workload text,
    gold text,                 -- the table or view of expected values; null where only two runs were compared
    answers text,              -- 'newest', or the run whose answers they are
    against text,              -- the other run; null where there is none
    run_id text,               -- of the newest answer compared: its report shows this evaluation
    created_at timestamptz,
    num_gold_rows bigint,
    num_ok bigint,
    num_errors bigint,         -- rows whose answer is an error; they count as wrong
    num_unanswered bigint      -- rows of gold without an answer; they count for coverage alone
)
