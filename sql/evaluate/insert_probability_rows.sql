-- purpose: the compared values of a column of probabilities: the probability and whether the event occurred
-- grain:   one row per expected value
-- inputs:  batchloom_pairs
-- parameters: $evaluation_id, $column, $true_label (the event is that this label is expected; null: that true is)

insert into evaluated_rows by name
with events as (
    select
        request_key,
        status,
        answer::double as probability,
        coalesce(given = $true_label, try_cast(given as boolean)) as is_right
    from batchloom_pairs
    where given is not null
)

select
    $evaluation_id as evaluation_id,
    'gold' as reference,
    $column as column_name,
    'probability' as kind,
    request_key,
    status,
    is_right::varchar as expected,
    probability::varchar as answer,
    is_right,
    probability as confidence,
    case
        when probability is null then map {'coverage': 0.0::double}
        else map {'coverage': 1.0::double, 'brier_score': (probability - is_right::integer) ** 2}
    end as measures
from events
