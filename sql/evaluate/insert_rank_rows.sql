-- purpose: ranked lists compared with graded relevance; rows that gold does not name are not relevant, as in trec_eval
-- grain:   one row per group with a relevant gold row
-- inputs:  batchloom_pairs, batchloom_answers
-- parameters: $evaluation_id, $column, $group (position in the key of the column within which rows are ranked),
--          $true_label (a row is relevant if this label is expected; null: the expected value is the grade), $k

insert into evaluated_rows by name
with graded as (
    select
        request_key[$group] as group_key,
        status,
        answer as rank,
        coalesce((given = $true_label)::integer, try_cast(given as double)) as relevance
    from batchloom_pairs
    where given is not null
),

ordered as (
    select *, row_number() over (partition by group_key order by relevance desc) as best_rank
    from graded
),

grouped as (
    select
        group_key,
        case
            when
                bool_or(status = 'ok')
                or group_key in (select request_key[$group] from batchloom_answers where status = 'ok')
                then 'ok'  -- a list that has none of the relevant rows is a list, too
            when bool_or(status = 'error') then 'error'
            else 'unanswered'
        end as status,
        avg((status = 'ok')::integer) as coverage,
        coalesce(sum(relevance / log2(rank + 1)) filter (rank <= $k), 0) as gain,
        sum(relevance / log2(best_rank + 1)) filter (best_rank <= $k) as best_gain,
        min(rank) filter (relevance > 0) as first_rank
    from ordered
    group by group_key
)

select
    $evaluation_id as evaluation_id,
    'gold' as reference,
    $column as column_name,
    'rank' as kind,
    [group_key] as request_key,
    status,
    first_rank::varchar as answer,
    case
        when status = 'unanswered' then map {'coverage': 0.0::double}
        else map {
            'coverage': coverage,
            'ndcg@' || $k::varchar: gain / best_gain,
            'mrr': coalesce(1 / first_rank, 0)::double
        }
    end as measures
from grouped
where best_gain > 0
