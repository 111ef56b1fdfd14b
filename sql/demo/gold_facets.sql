-- purpose: the facts of gold_facts, as answers to the questions of facets.toml
-- grain:   one row per document
-- inputs:  gold_facts
-- parameters: none

create or replace view gold_facets as
select doc_id, kind as subject, has_code as has_example
from gold_facts
