-- purpose: free the memory of a run's answers
-- grain:   none
-- inputs:  asked_questions
-- parameters: none

drop table asked_questions
