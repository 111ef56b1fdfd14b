-- purpose: a workload's checked requests: keys and prompt fields as text (null if no prompt will be made) with hashes, a
--          content key, the reason why a row cannot be answered, and its state: done, or why it is to be answered.
--          Rows are not sorted, since they are too wide with their text; sort_key has the key's order, and if it is
--          long, its beginning and a digest
-- grain:   one row per row of the workload's query
-- inputs:  batchloom_newest_answers, batchloom_row_layouts, macros bytes_of and problem_of
-- identifiers: {columns}: the key columns, then the other fields of the prompt; {priority} (any column if rows have no
--          priority); {sha256_of}: a function that gives what sha256 gives, but faster
-- parameters: $requests_sql (the workload's query), $keys and $fields (in the order of {columns}), $may_be_empty (of
--          the fields), $has_priority, $workload_digest, $model_digest, $questions (digests of the questions that each
--          row is asked; empty if a row makes one request)

with requested as not materialized (
    select {columns}, error, (case when $has_priority then {priority} end)::bigint as row_priority
    from (
        from query($requests_sql)
        union all by name
        select null::varchar as error, null::bigint as row_priority where false
    )
),

prefixed as (
    select
        decode(encode(columns($keys)::varchar), 'replace') as 'key_\0',
        bytes_of(columns($keys)) as 'id_\0',
        bytes_of(columns($fields)) as 'field_\0',
        nullif(ltrim(decode(encode(error::varchar), 'replace')), '') as error,
        coalesce(row_priority, 0) as row_priority
    from requested
),

judged as (
    select
        columns('^key_.*$'),
        columns('^field_.*$'),
        error,
        row_priority,
        coalesce({sha256_of}(columns('^field_.*$')), '-') as 'hash_\0',
        problem_of(columns('^id_.*$')) as 'idproblem_\0',
        problem_of(columns('^field_.*$')) as 'fieldproblem_\0'
    from prefixed
),

listed as (
    select
        columns('^key_.*$'),
        columns('^field_.*$'),
        error,
        row_priority,
        columns('^hash_.*$'),
        list_value(*columns('^key_.*$')) as request_key,
        list_value(*columns('^hash_.*$')) as hashes,
        list_value(*columns('^idproblem_.*$')) as problems_of_key,
        list_value(*columns('^fieldproblem_.*$')) as problems_of_fields
    from judged
),

reasoned as (
    select
        * exclude (error, problems_of_key, problems_of_fields),
        coalesce(
            list_filter(list_zip($keys, problems_of_key), lambda pair: pair[2] is not null)[1],
            case when error is not null then ('', error) end,
            list_filter(
                list_zip($fields, problems_of_fields),
                lambda pair:
                    pair[2] is not null
                    and not (pair[2] in ('is NULL', 'is empty') and list_contains($may_be_empty, pair[1]))
            )[1]
        ) as reason
    from listed
),

keyed as not materialized (
    select
        reasoned.* exclude (reason),
        batchloom_row_layouts.part_order as row_layout,
        nullif(ltrim(concat_ws(' ', reason[1], reason[2])), '') as error,
        sha256(
            concat_ws(
                ',',
                list_aggregate(
                    coalesce(list_select(hashes, batchloom_row_layouts.places), hashes), 'string_agg', ','
                ),
                reason[2],
                coalesce(batchloom_row_layouts.digest, $workload_digest),
                $model_digest
            )
        ) as content_key
    from reasoned
    left join batchloom_row_layouts using (request_key)
),

-- the latest view may show a content that is gone; the query runs again only if keys have several contents
kept as (
    select keyed.request_key, count(distinct keyed.content_key) as num_contents
    from keyed
    inner join batchloom_newest_answers as several using (request_key, content_key)
    where several.num_contents > 1
    group by keyed.request_key
),

final as (
    select
        keyed.*,
        case
            when
                newest_answers.is_settled
                and (newest_answers.settled is null or list_has_all(newest_answers.settled, $questions::varchar[]))
                then 'done'
            when answered.request_key is null then 'new'
            when newest_answers.request_key is null then 'with another text, prompt or model than before'
            when len($questions::varchar[]) > 0 then 'with questions not answered yet'
            else 'failed before'
        end as state,
        list_filter(
            range(len($questions::varchar[])),
            lambda number: not list_contains(coalesce(newest_answers.settled, []), ($questions::varchar[])[number + 1])
        )::integer[] as open_questions,
        create_sort_key(keyed.request_key, 'asc nulls last', keyed.content_key, 'asc nulls last') as whole_key
    from keyed
    left join kept using (request_key)
    left join batchloom_newest_answers as newest_answers  -- a correlated exists would hold all texts in memory
        on newest_answers.request_key = keyed.request_key
        and newest_answers.content_key = keyed.content_key
        and newest_answers.num_contents = coalesce(kept.num_contents, 1)
    left join (select distinct request_key from batchloom_newest_answers) as answered
        on answered.request_key = keyed.request_key
)

select
    columns('^key_.*$'),
    case when error is null and state <> 'done' then coalesce(decode(columns('^field_.*$')), '') end as 'text_\0',
    columns('^hash_.*$'),
    content_key,
    error,
    row_priority,
    state,
    open_questions,
    row_layout,
    case
        when octet_length(whole_key) > 300 then whole_key[:300] || unhex(sha256(whole_key))
        else whole_key
    end as sort_key
from final
