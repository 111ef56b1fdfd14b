-- purpose: schemas in which unqualified names are looked up, in order; new objects go to the first
-- grain:   a setting of the connection
-- inputs:  none
-- parameters: $schemas, as in '"planned".main,"team".main'

set search_path = $schemas
