-- purpose: add the demo's documents
-- grain:   one row per document
-- inputs:  none
-- parameters: $doc_ids, $titles, $bodies (lists of one length)

insert into documents (doc_id, title, body)
select unnest($doc_ids), unnest($titles), unnest($bodies)
