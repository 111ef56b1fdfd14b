-- purpose: insert the rows of a run that had these open questions, with all their answers: the run's, and for settled
--          questions those of the row's newest earlier answer. A row with an unanswered open question is left out
-- grain:   one row per request with $open_questions that the run finished
-- inputs:  the run's artifacts; view batchloom_asked_questions: parts and errors of tokens, one row per question asked
-- identifiers: {table}, {keys}, {answered}: columns of the open questions, {kept}: question_states and the columns of the
--          settled questions
-- parameters: $requests (path), $open_questions (numbers), $names and $digests (of all questions of the workload),
--          $model, $run_id, $created_at

insert into {table} by name
with kept as (  -- first, so that its table may have the name of another CTE
    select [{keys}] as request_key, content_key, {kept}
    from {table}
    where run_id <> $run_id and question_states is not null and len($open_questions) < len($names)
    qualify row_number() over (partition by {keys}, content_key order by created_at desc, run_id desc) = 1
),

requests as (
    select row_id, content_key, [{keys}] as request_key, {keys}
    from read_parquet($requests)
    where error is null and open_questions = $open_questions
),

answers as (  -- computes from reserved columns alone: those of the questions may have any name
    select
        asked.row_id // len($names) as row_id,
        map_from_entries(
            list(
                {
                    key: asked.row_id % len($names),
                    value: {
                        digest: $digests[asked.row_id % len($names) + 1],
                        finish_reason: finish_reason,
                        error: error
                    }
                }
            )
        ) as new_states,
        sum(num_prompt_tokens)::integer as num_prompt_tokens,
        sum(num_cached_tokens)::integer as num_cached_tokens,
        sum(num_output_tokens)::integer as num_output_tokens,
        sum(compute_ms) as compute_ms,
        min(prefix_group) as prefix_group
    from batchloom_asked_questions as asked
    group by all
    having count(distinct asked.row_id) = len($open_questions)
),

answered as (
    select row_id, any_value(columns(* exclude (row_id))) as '\0'
    from (select row_id // len($names) as row_id, {answered} from batchloom_asked_questions)
    group by row_id
),

stated as (
    select
        answers.row_id,
        list_transform(
            range(len($names)),
            lambda number: {
                name: $names[number + 1],
                state: coalesce(answers.new_states[number], kept.question_states[$names[number + 1]])
            }
        ) as states
    from answers
    inner join requests on requests.row_id = answers.row_id
    left join kept on kept.request_key = requests.request_key and kept.content_key = requests.content_key
),

judged as (
    select
        row_id,
        map_from_entries(list_transform(states, lambda each: {key: each.name, value: each.state})) as question_states,
        list_transform(states, lambda each: each.state.finish_reason) as finish_reasons,
        list_transform(
            list_filter(states, lambda each: each.state.error is not null),
            lambda each: each.name || ': ' || each.state.error
        ) as errors
    from stated
)

select
    requests.* exclude (row_id, content_key, request_key),
    answered.* exclude (row_id),
    kept.* exclude (request_key, content_key, question_states),
    judged.question_states,
    case when len(judged.errors) = 0 then 'ok' else 'error' end as status,
    nullif(array_to_string(judged.errors, '; '), '') as error,
    case
        when list_contains(judged.finish_reasons, 'error') then 'error'
        when list_contains(judged.finish_reasons, 'invalid') then 'invalid'
        else 'scored'
    end as finish_reason,
    answers.num_prompt_tokens,
    answers.num_cached_tokens,
    answers.num_output_tokens,
    answers.compute_ms,
    answers.prefix_group,
    $model as model,
    $run_id as run_id,
    $created_at as created_at,
    requests.content_key
from requests
inner join answers on answers.row_id = requests.row_id
inner join answered on answered.row_id = requests.row_id
inner join judged on judged.row_id = requests.row_id
left join kept on kept.request_key = requests.request_key and kept.content_key = requests.content_key
