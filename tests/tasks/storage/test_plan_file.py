"""A plan as rows of a file and back, and rows that do not fit each other."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import ArtifactError
from engine.planning.plan import COLUMNS
from engine.planning.plan_partitions import split_groups
from engine.planning.planner import plan_prompts
from tasks.storage.plan_file import plan_batches, plan_of_rows
from tasks.storage.schemas import PLAN_SCHEMA

STRETCHES = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 6)), min_size=1, max_size=4)
PROMPTS = st.lists(STRETCHES.map(lambda parts: [token for token, length in parts for _ in range(length)]), max_size=30)


@given(prompts=PROMPTS, partition_tokens=st.sampled_from([5, 40, 1000]))
def test_a_plan_comes_back_as_it_was(prompts: list[list[int]], partition_tokens: int) -> None:
    plan, _ = plan_prompts([np.array(prompt, dtype=np.int32) for prompt in prompts])
    plan = split_groups(plan, partition_tokens, 1)
    found = plan_of_rows(pa.Table.from_batches(plan_batches(plan), schema=PLAN_SCHEMA))
    assert [prompt.tolist() for prompt in found.prompts] == [prompts[row] for row in plan.row_id.tolist()]
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(found, name), getattr(plan, name), err_msg=name)
        assert getattr(found, name).dtype == getattr(plan, name).dtype


@pytest.mark.parametrize(
    ("group_id", "member_id", "num_prefix_tokens", "own_tokens", "why"),
    [
        ([0, 0], [0, 1], [3, 3], [[1, 2, 3], [5]], "row 0: num_prefix_tokens is 3, expected 0 to 2"),
        ([0, 0], [0, 1], [-1, -1], [[1, 2, 3], [5]], "row 0: num_prefix_tokens is -1"),
        ([0, 0], [0, 1], [2, 2], [[1, 2, 3], []], "row 1: num_prefix_tokens is 2, expected 0 to 1"),
        ([0, 0], [0, 1], [2, 1], [[1, 2, 3], [5]], "rows 0 and 1, group 0: the prefixes differ"),
        ([4, 4], [0, 0], [2, 1], [[1, 2, 3], []], "rows 0 and 1, group 4: the prefixes differ"),
        ([0, 0], [3, 3], [1, 1], [[1, 2, 3], [5]], "rows 0 and 1, group 0, member 3: the prompts differ"),
    ],
)
def test_a_stored_plan_that_does_not_fit_its_prompts_is_refused(
    group_id: list[int], member_id: list[int], num_prefix_tokens: list[int], own_tokens: list[list[int]], why: str
) -> None:
    columns: dict[str, Any] = {name: [0] * len(group_id) for name in COLUMNS}
    columns |= {"group_id": group_id, "member_id": member_id, "num_prefix_tokens": num_prefix_tokens}
    with pytest.raises(ArtifactError, match=why):
        plan_of_rows(pa.table(columns | {"token_ids": own_tokens}, schema=PLAN_SCHEMA))
