-- purpose: stands for batchloom_newest_answers where nothing counts as answered
-- grain:   no rows
-- inputs:  none
-- parameters: none

create or replace temp table batchloom_newest_answers (request_key varchar[], content_key varchar, settled varchar[])
