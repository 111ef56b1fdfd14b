-- purpose: the tables and views of batchloom; existing tables stay as they are, views are replaced
-- grain:   stated at each table
-- inputs:  none
-- parameters: none

-- inputs: filled by the user; they may be views with the same names and columns

-- one row per document
create table if not exists documents (
    doc_id text,
    title text,
    body text
);

-- one row per query
create table if not exists queries (
    query_id text,
    query_text text
);

-- one row per wanted snippet
create table if not exists snippet_requests (
    doc_id text,
    query_id text
);

-- one row per document to be ranked for a query
create table if not exists ranking_candidates (
    query_id text,
    doc_id text
);

-- outputs: rows are added and never changed, except for rank

-- one row per run and requested (doc_id, query_id)
create table if not exists snippets (
    doc_id text,
    query_id text,
    snippet text,
    status text,               -- ok, error
    error text,                -- why there is no answer
    finish_reason text,        -- eos, stop, length; invalid: not tried; error: all tries failed
    num_prompt_tokens integer,
    num_cached_tokens integer, -- prompt tokens that another row had computed
    num_output_tokens integer,
    compute_ms double,         -- share of the steps' time, by tokens computed for this row; 0 if all were shared
    prefix_group bigint,       -- in the run's plan: rows of a run with the same number share a prefix
    model text,
    run_id text,
    created_at timestamptz,
    content_key text           -- sha256 of prompt fields, workload and model: equal keys mean equal requests
);

-- one row per run and requested (query_id, doc_id)
create table if not exists rankings (
    query_id text,
    doc_id text,
    score double,              -- probability of the first label, 0 to 1
    rank integer,              -- within the query, among its newest answers; 1 is best; null for an error
    label text,                -- the most probable label
    label_logprobs double[],   -- natural logarithm, in the order of the workload's labels
    status text,
    error text,
    finish_reason text,        -- scored, invalid, error
    num_prompt_tokens integer,
    num_cached_tokens integer,
    num_output_tokens integer,
    compute_ms double,         -- share of the steps' time, by tokens computed for this row; 0 if all were shared
    prefix_group bigint,       -- in the run's plan: rows of a run with the same number share a prefix
    model text,
    run_id text,
    created_at timestamptz,
    content_key text
);

-- one row per run: one workload in one flow run
create table if not exists runs (
    run_id text,
    workload text,
    status text,               -- completed, interrupted, failed, deadline
    error text,
    started_at timestamptz,
    finished_at timestamptz,
    num_rows bigint,           -- rows that had no answer when the run began
    num_ok bigint,
    num_errors bigint,
    num_unanswered bigint,     -- status interrupted or deadline: rows that the next run answers
    num_already_done bigint,   -- rows that earlier runs had done, those that failed for good among them
    num_prompt_tokens bigint,
    num_cached_tokens bigint,
    num_output_tokens bigint,
    num_computed_tokens bigint, -- tokens that went through the model, without padding
    token_saving_ratio double, -- of the plan: shared tokens / prompt tokens, 0 to 1
    best_token_saving_ratio double, -- upper bound for any sharing of prefixes
    tokens_per_second double,  -- (prompt + output tokens) / infer_seconds; null if planned together with others
    read_seconds double,
    tokenize_seconds double,
    plan_seconds double,
    infer_seconds double,
    write_seconds double,
    num_steps bigint,
    model text,
    model_digest text,
    workload_digest text,
    config json,
    versions json,
    shared_with json           -- other workload of the same plan: prompt tokens in common; null if planned alone
);

-- one row per step of the engine
create table if not exists steps (
    run_id text,
    partition integer,
    step bigint,
    num_decode_tokens bigint,
    num_suffix_tokens bigint,
    num_prefix_tokens bigint,
    num_kv_blocks_used bigint,
    num_prefix_kv_blocks bigint, -- of these, blocks of shared prefixes
    num_request_kv_blocks bigint, -- of these, blocks of requests' own tokens
    num_cached_kv_blocks bigint, -- on top of these, cached by the LRU cache until blocks are needed
    num_kv_blocks_total bigint,
    num_running_requests bigint,
    num_waiting_requests bigint,
    num_finished_requests bigint,
    num_preempted_requests bigint,
    duration_ms double,
    num_padding_tokens bigint, -- on top of the three above: computed and discarded, if prompts are padded
    num_swapped_kv_blocks bigint, -- KV blocks of preempted requests in host memory after the step (preemption swap)
    num_guessed_tokens bigint, -- of the decode tokens: guesses of prompt_lookup
    num_right_tokens bigint,   -- of these, guesses that the model confirmed
    worker text,               -- the engine of the step, if several work side by side
    started_at timestamptz
);

-- the newest answer to each (doc_id, query_id) that is still requested and whose document and query exist
create or replace view latest_snippets as
with newest as (
    select *
    from snippets
    qualify row_number() over (
        partition by doc_id, query_id
        order by created_at desc, run_id desc, content_key, snippet, num_cached_tokens
    ) = 1
),

requested as (
    select
        decode(encode(doc_id::varchar), 'replace') as doc_id,
        decode(encode(query_id::varchar), 'replace') as query_id
    from snippet_requests
)

select
    doc_id, query_id, snippet, status, error, finish_reason, num_prompt_tokens, num_cached_tokens,
    num_output_tokens, compute_ms, prefix_group, model, run_id, created_at, content_key
from newest
where
    exists (
        select 1
        from requested
        where requested.doc_id is not distinct from newest.doc_id
            and requested.query_id is not distinct from newest.query_id
    )
    and (
        status = 'error'
        or (
            exists (select 1 from documents where documents.doc_id::varchar = newest.doc_id)
            and exists (select 1 from queries where queries.query_id::varchar = newest.query_id)
        )
    );

-- the newest score of each (query_id, doc_id) that is still a candidate; rank is among these rows
create or replace view latest_rankings as
with newest as (
    select *
    from rankings
    qualify row_number() over (
        partition by query_id, doc_id
        order by created_at desc, run_id desc, content_key, score, num_cached_tokens
    ) = 1
),

requested as (
    select
        decode(encode(query_id::varchar), 'replace') as query_id,
        decode(encode(doc_id::varchar), 'replace') as doc_id
    from ranking_candidates
)

select
    query_id,
    doc_id,
    score,
    case
        when status = 'ok'
            then (row_number() over (partition by query_id, status order by score desc, doc_id))::integer
    end as rank,
    label, label_logprobs, status, error, finish_reason, num_prompt_tokens, num_cached_tokens, num_output_tokens,
    compute_ms, prefix_group, model, run_id, created_at, content_key
from newest
where
    exists (
        select 1
        from requested
        where requested.query_id is not distinct from newest.query_id
            and requested.doc_id is not distinct from newest.doc_id
    )
    and (
        status = 'error'
        or (
            exists (select 1 from documents where documents.doc_id::varchar = newest.doc_id)
            and exists (select 1 from queries where queries.query_id::varchar = newest.query_id)
        )
    );

-- the ranked list of each query with texts: one row per query and document, best first
-- where two documents or two queries have one id, the view leaves it out, as the next run makes its rows errors
create or replace view ranked_documents as
with unique_queries as (
    select query_id::varchar as query_id, any_value(query_text::varchar) as query_text
    from queries
    group by query_id::varchar
    having count(*) = 1
),

unique_documents as (
    select doc_id::varchar as doc_id, any_value(title::varchar) as title
    from documents
    group by doc_id::varchar
    having count(*) = 1
)

select
    latest_rankings.query_id,
    decode(encode(unique_queries.query_text), 'replace') as query_text,
    latest_rankings.rank,
    latest_rankings.doc_id,
    decode(encode(unique_documents.title), 'replace') as title,
    latest_rankings.score
from latest_rankings
inner join unique_queries on unique_queries.query_id = latest_rankings.query_id
inner join unique_documents on unique_documents.doc_id = latest_rankings.doc_id
where latest_rankings.status = 'ok'
order by latest_rankings.query_id, latest_rankings.rank;

-- rows whose newest answer is an error, with the reason
create or replace view failed_rows as
select 'snippets' as workload, doc_id, query_id, finish_reason, error, run_id, created_at
from latest_snippets
where status = 'error'
union all
select 'ranking' as workload, doc_id, query_id, finish_reason, error, run_id, created_at
from latest_rankings
where status = 'error';

-- one row per run, newest first: counts, time, tokens that sharing saved; the best saving is NULL where a plan is of
-- several runs, whose best saving bounds no single one
create or replace view run_summary as
select
    run_id,
    workload,
    status,
    started_at,
    round(epoch(finished_at - started_at), 1) as total_seconds,
    num_rows,
    num_ok,
    num_errors,
    num_unanswered,
    num_already_done,
    num_prompt_tokens,
    num_cached_tokens as num_saved_tokens,
    round(100.0 * num_cached_tokens / nullif(num_prompt_tokens, 0), 1) as saved_percent,
    case when shared_with is null then round(100.0 * best_token_saving_ratio, 1) end as best_saved_percent,
    num_output_tokens,
    round(tokens_per_second, 1) as tokens_per_second,
    model,
    error
from runs
order by started_at desc, run_id;
