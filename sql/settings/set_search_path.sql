-- purpose: where names without a schema are looked up, first to last; what is created goes to the first
-- grain:   a setting of the connection
-- inputs:  none
-- parameters: $schemas, as in '"planned".main,"team".main'

set search_path = $schemas
