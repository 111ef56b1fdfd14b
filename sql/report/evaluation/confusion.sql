-- purpose: how often each label was answered where each label was expected
-- grain:   one row per column, expected and answered label
-- inputs:  evaluation_confusion
-- parameters: $evaluation_id

select column_name, expected, coalesce(answer, '(no answer)') as answer, num_rows
from evaluation_confusion
where evaluation_id = $evaluation_id and reference = 'gold'
order by column_name, expected, answer
