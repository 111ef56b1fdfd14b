-- purpose: the pairs of documents that are nearest in meaning
-- grain:   one row per pair
-- inputs:  latest_document_embeddings, documents
-- parameters: $num_rows

with embeddings as (
    select documents.doc_id, documents.title, latest_document_embeddings.embedding
    from latest_document_embeddings
    inner join documents on documents.doc_id = latest_document_embeddings.doc_id
    where latest_document_embeddings.status = 'ok'
)

select a.title, b.title as near_title, array_cosine_similarity(a.embedding, b.embedding) as similarity
from embeddings as a
inner join embeddings as b on a.doc_id < b.doc_id
order by similarity desc, a.doc_id, b.doc_id
limit $num_rows
