-- purpose: the requests of one workload for the rows chosen from another, with the same row_id; a chosen row that this
--          workload does not ask about has an error
-- grain:   one row per chosen row
-- inputs:  requests artifacts of both, as files
-- identifiers: {keys}
-- parameters: $requests (of this workload), $chosen

with asked as (
    select *
    from (
        from read_parquet($requests)
        union all by name -- of workloads that ask a row several questions
        select null::utinyint[] as open_questions where false
    )
    qualify row_number() over (partition by {keys} order by row_id) = 1
),

chosen as (
    select row_id, {keys} -- a key has the capitals that this workload gives it
    from asked
    where false
    union all by name
    select row_id, {keys}
    from read_parquet($chosen)
)

select asked.* exclude ({keys}) replace (
    chosen.row_id as row_id,
    coalesce(asked.content_key, '') as content_key,
    coalesce(asked.row_priority, 0) as row_priority,
    coalesce(asked.open_questions, []) as open_questions,
    case when asked.row_id is null then 'the other workload does not ask about this row' else asked.error end as error
), chosen.* exclude (row_id)
from chosen
left join asked using ({keys})
order by chosen.row_id
