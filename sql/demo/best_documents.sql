-- purpose: a few searches to show, with their best documents
-- grain:   one row per search and document
-- inputs:  ranked_documents
-- parameters: $num_searches, $num_documents

with searches as (
    select distinct query_id
    from ranked_documents
    order by query_id
    limit $num_searches
)

select ranked_documents.query_text, ranked_documents.rank, ranked_documents.title, ranked_documents.score
from ranked_documents
semi join searches on searches.query_id = ranked_documents.query_id
where ranked_documents.rank <= $num_documents
order by ranked_documents.query_id, ranked_documents.rank
