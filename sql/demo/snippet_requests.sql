-- purpose: add a request for each of the demo's questions and its document
-- grain:   one row per document and question
-- inputs:  none
-- parameters: $doc_ids, $query_ids (lists of one length)

insert into snippet_requests (doc_id, query_id)
select unnest($doc_ids), unnest($query_ids)
