-- purpose: 64-bit offsets in Arrow, so that a batch may hold more than 2 GiB of text
-- grain:   a setting of the connection
-- inputs:  none
-- parameters: none

set arrow_large_buffer_size = true
