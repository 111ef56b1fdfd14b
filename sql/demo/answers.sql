-- purpose: a few answers to show: one per document, only those that were not cut
-- grain:   one row per document
-- inputs:  latest_snippets, documents, queries
-- parameters: $num_rows

with answers as (
    select
        documents.doc_id,
        documents.title,
        queries.query_text,
        latest_snippets.snippet
    from latest_snippets
    inner join documents on documents.doc_id = latest_snippets.doc_id
    inner join queries on queries.query_id = latest_snippets.query_id
    where latest_snippets.status = 'ok' and latest_snippets.finish_reason = 'eos'
    qualify row_number() over (partition by documents.doc_id order by queries.query_id) = 1
)

select title, query_text, snippet
from answers
order by md5(doc_id)
limit $num_rows
