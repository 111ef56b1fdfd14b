-- purpose: how often each label was answered where each label was expected
-- grain:   one row per evaluation, reference, column, expected label and answered label (null: the answer is an error)
-- inputs:  evaluated_rows
-- parameters: none

create or replace view evaluation_confusion as
select evaluation_id, reference, column_name, expected, answer, count(*) as num_rows
from evaluated_rows
where kind = 'label' and status <> 'unanswered'
group by all
order by all
