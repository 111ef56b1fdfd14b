-- purpose: a few documents with their extracted facts and decided facets
-- grain:   one row per document
-- inputs:  latest_document_facts, latest_document_facets, documents
-- parameters: $num_rows

with facts as (
    select
        documents.doc_id,
        documents.title,
        latest_document_facts.kind,
        latest_document_facts.has_code,
        latest_document_facts.summary,
        latest_document_facets.difficulty
    from latest_document_facts
    inner join latest_document_facets on latest_document_facets.doc_id = latest_document_facts.doc_id
    inner join documents on documents.doc_id = latest_document_facts.doc_id
    where latest_document_facts.status = 'ok' and latest_document_facets.status = 'ok'
)

select title, kind, has_code, round(difficulty, 1) as difficulty, summary
from facts
order by md5(doc_id)
limit $num_rows
