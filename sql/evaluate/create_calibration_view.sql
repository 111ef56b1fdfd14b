-- purpose: a reliability diagram: the share of right answers among those with about the same confidence
-- grain:   one row per evaluation, column and tenth of confidence with at least one row
-- inputs:  evaluated_rows, macros batchloom_wilson_low and batchloom_wilson_high
-- parameters: none

create or replace view evaluation_calibration as
with binned as (
    select
        evaluation_id,
        column_name,
        least(floor(confidence * 10), 9)::integer as tenth,
        confidence,
        is_right
    from evaluated_rows
    where confidence is not null and is_right is not null and reference = 'gold'
),

bins as (
    select
        evaluation_id,
        column_name,
        tenth,
        count(*) as num_rows,
        avg(confidence) as mean_confidence,
        count_if(is_right) as num_right
    from binned
    group by all
)

select
    evaluation_id,
    column_name,
    tenth,
    num_rows,
    mean_confidence,
    num_right / num_rows as share_right,
    batchloom_wilson_low(num_right, num_rows) as low,
    batchloom_wilson_high(num_right, num_rows) as high
from bins
order by all
