-- purpose: what facts.toml should say of documents for which that can be proved
-- grain:   one row a document
-- inputs:  none
-- parameters: $doc_ids, $kinds, $have_code (lists of one length)

create or replace table gold_facts as
select
    unnest($doc_ids)::varchar as doc_id,
    unnest($kinds)::varchar as kind,
    unnest($have_code)::boolean as has_code
