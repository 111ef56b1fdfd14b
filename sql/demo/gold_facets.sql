-- purpose: the same for the questions of facets.toml
-- grain:   one row a document
-- inputs:  gold_facts
-- parameters: none

create or replace view gold_facets as
select doc_id, kind as subject, has_code as has_example
from gold_facts
