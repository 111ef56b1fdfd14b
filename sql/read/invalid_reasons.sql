-- purpose: why rows have no prompt; reasons are grouped without their quoted texts and numbers
-- grain:   one row per reason
-- inputs:  tokens artifact, as a file
-- parameters: $tokens, $num_questions (prompts per row)

select
    regexp_replace(regexp_replace(error, '(^|[\s(,=])''.*''', '\1…', 'gs'), '\d[\d,.]*', '#', 'g') as reason,
    count(distinct row_id // $num_questions) as num_rows
from read_parquet($tokens)
where error is not null
group by reason
order by num_rows desc, reason
