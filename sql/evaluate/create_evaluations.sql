-- purpose: the evaluations: which answers were compared with which expected values
-- grain:   one row per evaluation
-- inputs:  none
-- parameters: none

create table if not exists evaluations (
    evaluation_id text,
    workload text,
    gold text,                 -- the table or view of expected values; null if only two runs were compared
    answers text,              -- 'newest', or the run that gave the answers
    against text,              -- the other run; null if there is none
    run_id text,               -- run of the newest compared answer: its report shows this evaluation
    created_at timestamptz,
    num_gold_rows bigint,
    num_ok bigint,
    num_errors bigint,         -- rows with an error; against gold, what they do not answer is wrong
    num_unanswered bigint      -- gold rows without an answer; they count for coverage only
)
