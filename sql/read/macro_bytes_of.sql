-- purpose: the bytes of a value's text, whatever its type; string functions must not see bytes that are not UTF-8
--          (trim and lower end the whole database connection on them), so that checks work on bytes
-- grain:   a scalar
-- inputs:  none
-- parameters: none

create or replace temp macro bytes_of(value) as encode(value::varchar), (value blob) as value
