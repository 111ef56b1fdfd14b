"""Groups rebuilt from stored rows: what does not fit is refused. That what fits comes out right is a property."""

import numpy as np
import pytest

from engine.errors import ArtifactError
from engine.planning.prefix_groups import rebuild_groups


@pytest.mark.parametrize(
    ("group_id", "member_id", "num_prefix_tokens", "why"),
    [
        ([0, 0], [0, 1], [3, 3], "row 0: num_prefix_tokens is 3, expected 0 to 2"),
        ([0, 0], [0, 1], [-1, 2], "row 0: num_prefix_tokens is -1"),
        ([0, 0], [0, 1], [2, 1], "rows 0 and 1, group 0: the prefixes differ"),
        ([4, 4], [1, 0], [2, 2], "rows 1 and 0, group 4: the prefixes differ"),
        ([0, 0], [3, 3], [1, 1], "rows 0 and 1, group 0, member 3: the prompts differ"),
        ([0], [0, 1], [1, 1], r"column group_id has shape \(1,\), expected \(2,\)"),
    ],
)
def test_a_stored_plan_that_does_not_fit_its_prompts_is_refused(
    group_id: list[int], member_id: list[int], num_prefix_tokens: list[int], why: str
) -> None:
    prompts = [np.array(tokens, dtype=np.int32) for tokens in ([1, 2, 3], [1, 5, 3])]
    with pytest.raises(ArtifactError, match=why):
        rebuild_groups(prompts, group_id, member_id, num_prefix_tokens)
