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

counted as (
    select requested.*, document_counts.num_rows as num_documents, query_counts.num_rows as num_queries
    from requested
    left join document_counts on document_counts.doc_id = requested.doc_id
    left join query_counts on query_counts.query_id = requested.query_id
)

select
    counted.doc_id,
    counted.query_id,
    document_texts.title,
    document_texts.body,
    query_texts.query_text,
    case
        when counted.num_documents is null
            then concat('doc_id ''', counted.doc_id, ''' is not in documents')
        when counted.num_documents > 1
            then concat('doc_id ''', counted.doc_id, ''' has ', counted.num_documents, ' rows in documents')
        when counted.num_queries is null
            then concat('query_id ''', counted.query_id, ''' is not in queries')
        when counted.num_queries > 1
            then concat('query_id ''', counted.query_id, ''' has ', counted.num_queries, ' rows in queries')
    end as error
from query_texts  -- left side streams: texts of one request each; in memory: what many share
right join counted on counted.query_id = query_texts.query_id and counted.num_queries = 1
left join document_texts on document_texts.doc_id = counted.doc_id and counted.num_documents = 1
