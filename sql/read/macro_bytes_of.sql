-- purpose: the bytes of a value's text, of any type. Checks work on bytes, because string functions such as trim and
--          lower invalidate the database connection on bytes that are not UTF-8
-- grain:   a scalar
-- inputs:  none
-- parameters: none

create or replace temp macro bytes_of(value) as
case when typeof(value) = 'BLOB' then value::varchar::blob else encode(value::varchar) end
