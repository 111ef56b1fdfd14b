-- purpose: add the demo's questions and searches
-- grain:   one row per query
-- inputs:  none
-- parameters: $query_ids, $texts (lists of one length)

insert into queries (query_id, query_text)
select unnest($query_ids), unnest($texts)
