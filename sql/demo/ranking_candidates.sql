-- purpose: add the demo's candidates to be ranked
-- grain:   one row per search and document
-- inputs:  none
-- parameters: $query_ids, $doc_ids (lists of one length)

insert into ranking_candidates (query_id, doc_id)
select unnest($query_ids), unnest($doc_ids)
