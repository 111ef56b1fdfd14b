-- purpose: a reliability diagram: the share of right answers among those with about the same confidence
-- grain:   one row per evaluation, column and tenth of confidence with at least one row
-- inputs:  evaluated_rows
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
        avg(is_right::integer) as share_right
    from binned
    group by all
)

select
    evaluation_id,
    column_name,
    tenth,
    num_rows,
    mean_confidence,
    share_right,
    -- Wilson's interval, 95%
    greatest(
        0,
        share_right
        + 1.9208 / num_rows
        - 1.96 * sqrt(share_right * (1 - share_right) / num_rows + 0.9604 / num_rows ** 2)
    )
    / (1 + 3.8416 / num_rows) as low,
    least(
        1,
        (
            share_right
            + 1.9208 / num_rows
            + 1.96 * sqrt(share_right * (1 - share_right) / num_rows + 0.9604 / num_rows ** 2)
        )
        / (1 + 3.8416 / num_rows)
    ) as high
from bins
order by all
