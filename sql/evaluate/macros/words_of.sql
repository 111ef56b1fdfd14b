-- purpose: the words of a text in lower case; in scripts that put no spaces between words, each character is one
-- grain:   one list per text
-- inputs:  none
-- parameters: none

create or replace temp macro words_of(text) as
    regexp_extract_all(
        lower(coalesce(text, '')),
        '[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]'
        || '|(?:[^\PL\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}]|[\pM\pN])+'
    )
