-- purpose: free the memory of a run's answers
-- grain:   none
-- inputs:  batchloom_asked_questions
-- parameters: none

drop table batchloom_asked_questions
