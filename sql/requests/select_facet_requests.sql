-- purpose: every document with its text, or with an error if its doc_id is not unique
-- grain:   one row per row of documents
-- inputs:  documents
-- parameters: none

with document_counts as (
    select documents.doc_id::varchar as doc_id, count(*) as num_rows
    from documents
    group by documents.doc_id::varchar
),

final as (
    select
        documents.doc_id::varchar as doc_id,
        documents.title,
        documents.body,
        case
            when document_counts.num_rows > 1
                then concat('doc_id ''', documents.doc_id, ''' has ', document_counts.num_rows, ' rows in documents')
        end as error
    from documents
    left join document_counts on document_counts.doc_id = documents.doc_id::varchar
)

select doc_id, title, body, error
from final
