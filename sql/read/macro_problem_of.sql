-- purpose: why bytes cannot be used as text; null if they can
-- grain:   a scalar
-- inputs:  none
-- parameters: none

create or replace temp macro problem_of(bytes) as
case
    when bytes is null then 'is NULL'
    when try(decode(bytes)) is null then 'holds bytes that are not UTF-8'
    when not regexp_matches(try(decode(bytes)), '[^\s\x00\v]') then 'is empty'
end
