-- purpose: the probability of the answered label, from the type of the probabilities: the probability of true, or of
--          the answer where that is no boolean, the log-probabilities of all labels, or the probability of each label by
--          name
-- grain:   a scalar
-- inputs:  none
-- parameters: none

create or replace temp macro probability_of_answer(answer, probability) as null::double,
(answer varchar, probability double) as case when answer = 'false' then 1 - probability else probability end,
(answer varchar, probability double[]) as exp(list_max(probability)),
(answer varchar, probability map(varchar, double)) as probability[answer]
