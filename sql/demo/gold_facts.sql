-- purpose: the right answers of facts.toml for documents where Python can prove them
-- grain:   one row per document
-- inputs:  none
-- parameters: $doc_ids, $kinds, $have_code (lists of one length)

create or replace table gold_facts as
select
    unnest($doc_ids)::varchar as doc_id,
    unnest($kinds)::varchar as kind,
    unnest($have_code)::boolean as has_code
