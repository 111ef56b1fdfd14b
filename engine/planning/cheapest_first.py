"""The order of groups for nights that end at a deadline: most rows first."""

import numpy as np

from engine.planning.prefix_tree import IndexArray


def rank_cheapest_first(group_costs: IndexArray, group_priorities: IndexArray, num_rows: IndexArray) -> IndexArray:
    """Priorities that put groups with the least cost per row first among those of one priority: int64 ``[num_groups]``,
    as `group_costs`, `group_priorities` and `num_rows`, from 0; a higher number comes first. Costs per row within a
    fifth of each other count as equal, so that groups stay next to those they share with. See `place_groups`."""
    classes = np.floor(4 * np.log2(np.maximum(group_costs, 1) / num_rows)).astype(np.int64)
    pairs = np.stack([group_priorities, -classes], axis=1)
    return np.asarray(np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1), dtype=np.int64)
