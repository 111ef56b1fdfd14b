-- purpose: the width of a histogram's bins: the least of 1, 2 or 5 times 10^n so that num_bins bins reach past longest
-- grain:   a scalar
-- inputs:  none
-- parameters: none

create or replace temp macro report_nice_width(longest, num_bins) as
list_min(
    list_filter(
        flatten(list_transform(range(10), lambda power: [1, 2, 5] .list_transform(lambda digit: digit * 10 ** power))),
        lambda width: width * num_bins > longest
    )
)::bigint
