-- purpose: every wanted snippet, with its prompt's texts, or an error if a text is missing or not unique
-- grain:   one row per row of snippet_requests
-- inputs:  snippet_requests, documents, queries
-- parameters: none

with requested as (
    select snippet_requests.doc_id::varchar as doc_id, snippet_requests.query_id::varchar as query_id
    from snippet_requests
),

document_texts as not materialized (
    select documents.doc_id::varchar as doc_id, documents.title, documents.body
    from documents
),

query_texts as not materialized (
    select queries.query_id::varchar as query_id, queries.query_text
    from queries
),

document_counts as (
    select doc_id, count(*) as num_rows
    from document_texts
    group by doc_id
),

query_counts as (
    select query_id, count(*) as num_rows
    from query_texts
    group by query_id
),

unique_documents as (
    select document_texts.doc_id, document_texts.title, document_texts.body
    from document_texts
    semi join document_counts
        on document_counts.doc_id = document_texts.doc_id and document_counts.num_rows = 1
),

unique_queries as (
    select query_texts.query_id, query_texts.query_text
    from query_texts
    semi join query_counts
        on query_counts.query_id = query_texts.query_id and query_counts.num_rows = 1
),

final as (
    select
        requested.doc_id,
        requested.query_id,
        unique_documents.title,
        unique_documents.body,
        unique_queries.query_text,
        case
            when document_counts.num_rows is null
                then concat('doc_id ''', requested.doc_id, ''' is not in documents')
            when document_counts.num_rows > 1
                then concat('doc_id ''', requested.doc_id, ''' has ', document_counts.num_rows, ' rows in documents')
            when query_counts.num_rows is null
                then concat('query_id ''', requested.query_id, ''' is not in queries')
            when query_counts.num_rows > 1
                then concat('query_id ''', requested.query_id, ''' has ', query_counts.num_rows, ' rows in queries')
        end as error
    from unique_queries  -- left side streams: texts of one request each; in memory: what many share
    right join requested on requested.query_id = unique_queries.query_id
    left join document_counts on document_counts.doc_id = requested.doc_id
    left join query_counts on query_counts.query_id = requested.query_id
    left join unique_documents on unique_documents.doc_id = requested.doc_id
)

select doc_id, query_id, title, body, query_text, error
from final
