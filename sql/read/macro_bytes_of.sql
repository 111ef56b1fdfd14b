-- purpose: the bytes of a value's text, of any type. Checks work on bytes, because string functions such as trim and
--          lower invalidate the database connection on bytes that are not UTF-8
-- grain:   a scalar
-- inputs:  none
-- parameters: none

create or replace temp macro bytes_of(value) as encode(value::varchar), (value blob) as value
