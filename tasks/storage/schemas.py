"""The columns of tokens.parquet and plan.parquet."""

import pyarrow as pa

NUMBERS = pa.list_(pa.field("item", pa.int32(), nullable=False))
"""The type of a column whose values are lists of token ids, or of numbers of questions."""

TOKENS_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64(), nullable=False),
        pa.field("token_ids", NUMBERS, nullable=False),
        pa.field("error", pa.string()),
        pa.field("priority", pa.int64(), nullable=False),
    ]
)
"""One row a request, in the requests' order; token_ids is empty exactly where there is an error."""

PLAN_SCHEMA = pa.schema(
    [
        pa.field("row_id", pa.int64(), nullable=False),
        pa.field("group_id", pa.int64(), nullable=False),
        pa.field("member_id", pa.int64(), nullable=False),
        pa.field("num_prefix_tokens", pa.int32(), nullable=False),
        pa.field("num_common_tokens", pa.int32(), nullable=False),
        pa.field("partition", pa.int32(), nullable=False),
        pa.field("priority", pa.int64(), nullable=False),
        pa.field("token_ids", NUMBERS, nullable=False),
    ]
)
"""The columns of `Plan`, one row for each row without error, sorted by partition, group, member, row. token_ids holds
what earlier rows do not: the whole prompt in a group's first row, the suffix in the first row of each other member,
nothing else. num_common_tokens refers to the group before in the file. The metadata holds the `PlanSummary`."""
