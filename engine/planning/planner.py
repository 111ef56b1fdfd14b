"""Prompts to a plan (BatchLLM section 4.2): the whole batch at once, or range by range where it is larger than memory.

Sorted prompts share the longest prefixes with their neighbours, so each range is planned as a batch of its own. Tokens
that two ranges have in common are computed in both, so ranges are cut where neighbours have the least in common.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

import numpy as np

from engine.errors import ConfigError
from engine.planning.choose_by_paper import choose_by_paper
from engine.planning.choose_exactly import choose_exactly
from engine.planning.plan import Plan, SharingStats
from engine.planning.prefix_tree import IndexArray, PrefixTree, TokenArray, build_prefix_tree

PlanMethod = Literal["exact", "paper", "none"]
"""Which nodes of a prefix tree become prefixes. A prompt shares at most one.

exact: computes the fewest prompt tokens that any such grouping can, where groups share the full KV blocks that they
begin with. A leaf uses the deepest chosen node above it, or is planned alone and shares only such blocks.
paper: Algorithm 1 of BatchLLM, which compares one level of the tree with the next, bottom up.
none: a group of each distinct prompt. Without a block size, as for encoders, nothing else is shared.
"""

RANGE_TOKENS = 32_000_000
"""Tokens of a range: 128 MB, held about four times while they are planned."""

ROW_TOKENS = 64
"""Added to the size of each row, so that short prompts do not make ranges of millions of rows."""

Row = tuple[int, int, TokenArray]
"""Row id, priority and prompt."""


def plan_prompts(
    prompts: Sequence[TokenArray],
    *,
    method: PlanMethod = "exact",
    block_size: int | None = None,
    row_id: IndexArray | None = None,
    priority: IndexArray | None = None,
) -> tuple[Plan, SharingStats]:
    """A plan in columns, and its token counts. See `engine.planning.prefix_groups.plan_prefix_groups`.

    Args:
        prompts: contiguous int32 arrays ``[num_tokens]``, none of them empty; this is not checked.
        block_size: tokens in the KV blocks that groups share; None: groups share no blocks.
        row_id: int64 ``[num_rows]``, ascending where prompts are equal; by default the positions.
        priority: int64 ``[num_rows]``; by default 0.
    Raises:
        ConfigError: the method is unknown.
    """
    tree = build_prefix_tree(prompts)
    prefix_nodes = choose_prefixes(tree, method, block_size)

    # Group order: by the first leaf below the group's node, an ancestor before its descendants.
    leaves = np.arange(tree.num_leaves)
    is_alone = prefix_nodes == 0
    group_keys = np.where(is_alone, tree.num_nodes + leaves, prefix_nodes)
    first_leaves = np.where(is_alone, leaves, tree.node_leaf_starts[prefix_nodes])
    order = np.lexsort((group_keys, first_leaves))
    is_group_start = np.diff(group_keys[order], prepend=-1) != 0
    group_of_leaf = np.cumsum(is_group_start) - 1  # from here on, leaves are in group order
    members = leaves - np.flatnonzero(is_group_start)[group_of_leaf]
    prefix_lens = tree.node_depths[prefix_nodes][order]

    leading_lens = np.where(is_alone[order], tree.leaf_lens[order] - 1, prefix_lens)[is_group_start]
    common_lens = _group_common_lens(tree.leaf_common_lens, first_leaves[order][is_group_start], leading_lens)

    num_owners = np.diff(tree.row_starts)[order]
    leaf_of_row = np.repeat(leaves, num_owners)
    rows_before = np.cumsum(num_owners) - num_owners
    rows = tree.rows[tree.row_starts[order][leaf_of_row] + np.arange(len(tree.rows)) - rows_before[leaf_of_row]]
    plan = Plan(
        prompts=[prompts[row] for row in rows.tolist()],
        row_id=rows if row_id is None else row_id[rows],
        group_id=group_of_leaf[leaf_of_row],
        member_id=members[leaf_of_row],
        num_prefix_tokens=prefix_lens[leaf_of_row].astype(np.int32),
        num_common_tokens=common_lens[group_of_leaf][leaf_of_row].astype(np.int32),
        partition=np.zeros(len(rows), dtype=np.int32),
        priority=np.zeros(len(rows), dtype=np.int64) if priority is None else priority[rows],
    )
    return plan, SharingStats(
        num_logical_tokens=tree.num_logical_tokens,
        num_processed_tokens=plan.num_computed_tokens - plan.num_common_block_tokens(block_size),
        num_best_tokens=tree.num_trie_tokens if method != "none" or block_size else plan.num_computed_tokens,
    )


def plan_ranges(
    rows: Iterable[Row],
    *,
    method: PlanMethod = "exact",
    block_size: int | None = None,
    range_tokens: int = RANGE_TOKENS,
) -> Iterator[tuple[Plan, SharingStats]]:
    """Plans sorted prompts range by range; one range where all fit. Group ids of each range count from 0. Yields the
    plan of each range and its token counts; num_best_tokens omits those that the range before has counted.

    Args:
        rows: in the byte order of the token ids (`PrefixTree`), of equal prompts by row id.
        method, block_size: see `plan_prompts`.
        range_tokens: most tokens in a range, with `ROW_TOKENS` for each row; a longer prompt is a range of its own.
    """
    before: tuple[Plan, TokenArray] | None = None
    for part in _cut_ranges(rows, range_tokens):
        row_ids, priorities, prompts = zip(*part, strict=True)
        columns = {"row_id": np.array(row_ids, np.int64), "priority": np.array(priorities, np.int64)}
        plan, sharing = plan_prompts(prompts, method=method, block_size=block_size, **columns)
        if before is not None:
            from engine.planning.range_cuts import join_ranges, num_shared_tokens  # imported only when needed

            plan = join_ranges(before[0], plan)
            num_repeated_tokens = num_shared_tokens(before[1], prompts[0]) if method != "none" or block_size else 0
            sharing = replace(sharing, num_best_tokens=sharing.num_best_tokens - num_repeated_tokens)
        yield plan, sharing
        before = plan.take(plan.group_starts[-1:]), prompts[-1]


def _group_common_lens(leaf_common_lens: IndexArray, first_leaves: IndexArray, leading_lens: IndexArray) -> IndexArray:
    """Tokens that each group's leading tokens have in common with those of the group before; 0 for the first group."""
    if not len(first_leaves):
        return first_leaves
    between = np.minimum.reduceat(leaf_common_lens, first_leaves)[:-1]
    lens = np.minimum(leading_lens[:-1], leading_lens[1:])
    is_below = np.diff(first_leaves) == 0
    return np.concatenate([[0], np.where(is_below, lens, np.minimum(lens, between))])


def _cut_ranges(rows: Iterable[Row], range_tokens: int) -> Iterator[list[Row]]:
    pending: list[Row] = []
    num_pending = 0
    for row in rows:
        if pending and num_pending + count_size(row) > range_tokens:
            from engine.planning.range_cuts import find_cut

            end = find_cut(pending, row, num_pending)
            yield pending[:end]
            num_pending -= sum(map(count_size, pending[:end]))
            pending = pending[end:]
        pending.append(row)
        num_pending += count_size(row)
    if pending:
        yield pending


def count_size(row: Row) -> int:
    return len(row[-1]) + ROW_TOKENS


def choose_prefixes(tree: PrefixTree, method: PlanMethod, block_size: int | None = None) -> IndexArray:
    """The node whose tokens each leaf uses as its prefix, or 0 for none: int64 ``[num_leaves]``. Raises `ConfigError`
    if the method is unknown.

    Args:
        block_size: tokens in a KV block, and in the shortest prefix; None: groups share no blocks.
    """
    if method not in get_args(PlanMethod):
        raise ConfigError(f"method must be one of {', '.join(map(repr, get_args(PlanMethod)))}, got {method!r}")
    if method == "none" or tree.num_nodes == 1:  # nothing is shared
        return np.zeros(tree.num_leaves, dtype=np.int64)
    return choose_exactly(tree, block_size) if method == "exact" else choose_by_paper(tree, block_size)
