"""Runs of full blocks above prefix groups, on cases small enough to draw."""

import numpy as np
import pytest

from engine.errors import ConfigError
from engine.planning.plan import plan_prefix_groups
from engine.planning.prefix_groups import Member, PrefixGroup
from engine.planning.shared_runs import plan_shared_runs
from engine.planning.sharing_stats import measure_sharing


def test_groups_below_one_instruction_share_its_full_blocks() -> None:
    instruction, document, other = [*range(10)], [*range(10, 17)], [*range(20, 29)]
    prompts = [
        *(instruction + document + [100 + i, 0] for i in range(4)),
        *(instruction + other + [200 + i, 0] for i in range(3)),
        [*instruction, 300, 0],
    ]
    groups = plan_prefix_groups(prompts)
    assert sorted((len(group.prefix), len(group.members)) for group in groups) == [(0, 1), (17, 4), (19, 3)]
    forest = plan_shared_runs(groups, block_size=4)
    (run,) = forest.runs
    assert (run.parent, run.start, run.end, run.num_groups) == (-1, 0, 8, 3)
    assert run.token_ids.tolist() == prompts[0][:8]
    assert forest.group_runs.tolist() == [0, 0, 0]
    assert measure_sharing(groups, forest).num_processed_tokens == measure_sharing(groups).num_processed_tokens - 2 * 8


def test_runs_lie_below_runs() -> None:
    one, two, three = ([*range(8), *range(base, base + 4)] for base in (20, 30, 40))
    groups = [
        PrefixGroup(prefix=np.array(prefix, dtype=np.int32), members=(Member(request_indices=(i,), suffix=suffix),))
        for i, (prefix, suffix) in enumerate(
            (prefix, np.array([99], dtype=np.int32)) for prefix in ([*one, 1], [*one, 2], two, three[:9], [50])
        )
    ]
    forest = plan_shared_runs(groups, block_size=4)
    assert [(run.parent, run.start, run.end, run.num_groups) for run in forest.runs] == [(-1, 0, 8, 4), (0, 8, 12, 2)]
    assert forest.group_runs.tolist() == [1, 1, 0, 0, -1]
    assert [run.index for run in forest.path(1)] == [0, 1]
    assert forest.path(4) == []
    assert [forest.num_covered_tokens(i) for i in range(5)] == [12, 12, 8, 8, 0]


def test_runs_never_reach_the_last_token_of_a_prompt_planned_alone() -> None:
    """Two such prompts can begin alike where the rest of their groups is elsewhere, in another partition, say."""
    groups = [
        PrefixGroup(
            prefix=np.empty(0, dtype=np.int32),
            members=(Member(request_indices=(i,), suffix=np.arange(num_tokens, dtype=np.int32)),),
        )
        for i, num_tokens in enumerate((8, 9))
    ]
    assert [plan_shared_runs(groups, 4).num_covered_tokens(i) for i in range(2)] == [4, 4]


def test_no_groups_have_no_runs() -> None:
    forest = plan_shared_runs([], 16)
    assert (forest.runs, len(forest.group_runs), forest.num_saved_tokens) == ((), 0, 0)
    with pytest.raises(ConfigError, match="block_size must be at least 1, got 0"):
        plan_shared_runs([], 0)
