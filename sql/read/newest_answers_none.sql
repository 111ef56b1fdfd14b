-- purpose: batchloom_newest_answers without rows: nothing counts as answered
-- grain:   no rows
-- inputs:  none
-- parameters: none

create or replace temp table batchloom_newest_answers (
    request_key varchar[],
    content_key varchar,
    num_contents bigint,
    is_settled boolean,
    settled varchar[]
)
