"""The tiles of a step before their KV ranges are split, and packs of short ones.

Decode rows on short own KV make tiny tiles, many more than the device runs at once, each with a start, a query and a
store of its own for a few KV blocks. A *packed tile* takes as many of them as fit its rows: it reads the same KV, the
blocks of one sequence after those of the other, in one loop that need not begin anew at each, and the matrix product,
whose rows a single query would leave empty, costs the same. Packs are made only as large as keeps every program slot
busy to the end.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.triton.cost_model import Choice, StepSizes
from engine.kernels.triton.tile_ranges import Floats, Ints, slot_costs
from engine.kernels.triton.tuned import Launch

SLOT_BITS = 8
"""The lowest bits of an entry of a block table: the last slot of the block that may be read. The others: the block."""

MOST_BLOCKS = 1 << (31 - SLOT_BITS)
"""Of a KV cache, so that an entry is an int32."""

SHORT_STARTS = 4
"""A tile is short where its start takes this part of its time, or more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Tiles before their KV ranges are split. Every attribute is an int64 array over the jobs, but cost_us."""

    first_row_id: Ints
    num_tokens: Ints
    shape: Ints
    kv_begin: Ints
    kv_end: Ints
    prefix_len: Ints
    prefix_entry: Ints
    own_entry: Ints
    cost_us: Floats

    def take(self, index: Ints) -> "Jobs":
        """Jobs by their numbers."""
        return Jobs(**{name: getattr(self, name)[index] for name in Jobs.__slots__})


def own_jobs(batch: AttentionBatch, sizes: StepSizes, choice: Choice, group_size: int) -> Jobs:
    """Every sequence's rows, in tiles of its shape; in row order.

    Args:
        batch, sizes: the step.
        choice: of the cost model: the shapes and who shares its prefix.
        group_size: query heads of a KV head.
    """
    tokens = tokens_a_tile(choice.launch, group_size)[choice.own_shape]
    num_tiles = cdiv(sizes.num_rows, tokens)
    sequence, index = expand(num_tiles)
    tokens, num_rows, group = tokens[sequence], sizes.num_rows[sequence], sizes.group[sequence]
    num_tokens = np.minimum(tokens, num_rows - index * tokens)
    prefix_len = sizes.prefix[sequence]
    is_shared = choice.is_shared[sequence]
    own_end = sizes.suffix_lens[sequence] - num_rows + index * tokens + num_tokens
    num_read = own_end + np.where(is_shared, 0, prefix_len)
    return Jobs(
        first_row_id=batch.cu_seqlens_q[sequence] + index * tokens,
        num_tokens=num_tokens,
        shape=choice.own_shape[sequence],
        kv_begin=np.where(is_shared, prefix_len, 0),
        kv_end=prefix_len + own_end,
        prefix_len=prefix_len,
        prefix_entry=batch.prefix_block_starts[group].astype(np.int64),
        own_entry=len(batch.prefix_block_ids) + batch.suffix_block_starts[sequence].astype(np.int64),
        cost_us=_cost_us(choice.launch, choice.own_shape[sequence], num_read),
    )


def prefix_jobs(batch: AttentionBatch, sizes: StepSizes, choice: Choice, group_size: int) -> tuple[Jobs, Ints, Ints]:
    """The shared rows of each group, in tiles of its shape: jobs, row ids that follow the batch's own, jobs' groups.

    Args:
        batch, sizes, choice, group_size: as for `own_jobs`.
    """
    num_rows = np.where(choice.is_shared, sizes.num_rows, 0)
    sequence, offset = expand(num_rows)
    row_ids = batch.cu_seqlens_q[sequence] + offset
    rows_of_group = np.bincount(sizes.group, weights=num_rows, minlength=batch.num_groups).astype(np.int64)
    tokens = tokens_a_tile(choice.launch, group_size)[choice.prefix_shape]
    group, index = expand(cdiv(rows_of_group, tokens))
    tokens = tokens[group]
    prefix_len = sizes.prefix_lens[group]
    first_of_group = batch.num_rows + np.cumsum(rows_of_group) - rows_of_group
    jobs = Jobs(
        first_row_id=first_of_group[group] + index * tokens,
        num_tokens=np.minimum(tokens, rows_of_group[group] - index * tokens),
        shape=choice.prefix_shape[group],
        kv_begin=np.zeros(len(group), dtype=np.int64),
        kv_end=prefix_len,
        prefix_len=prefix_len,
        prefix_entry=batch.prefix_block_starts[group].astype(np.int64),
        own_entry=np.zeros(len(group), dtype=np.int64),
        cost_us=_cost_us(choice.launch, choice.prefix_shape[group], prefix_len),
    )
    return jobs, row_ids, group


@dataclass(frozen=True, slots=True, kw_only=True)
class Packs:
    """Short tiles of one row each, several to a packed tile. Positions in a pack count from its first block on.

    Attributes:
        is_packed: bool, per own job, whether it is in a pack.
        jobs: the packs, none of which is split; their rows follow those of other row ids.
        part: int64, per pack, which part of its rows it is; -1: all of them.
        rows: int64, the packs' rows of the batch.
        first_seen, positions: int64, per row: of its own KV the first position in its pack and the last.
        entries: int32, the packs' block table.
    """

    is_packed: npt.NDArray[np.bool_]
    jobs: Jobs
    part: Ints
    rows: Ints
    first_seen: Ints
    positions: Ints
    entries: npt.NDArray[np.int32]

    @classmethod
    def of(
        cls,
        jobs: Jobs,
        num_parts: Ints,
        batch: AttentionBatch,
        launch: Launch,
        group_size: int,
        *,
        longest_us: float,
        first_row_id: int,
    ) -> "Packs":
        """Packs short jobs of one row and narrow shape that read nothing but own KV, and are not split.

        Args:
            jobs: the own tiles of the step.
            num_parts: per job, the parts of its rows' attention; 0 where the job itself is split.
            launch: gives the rows of a narrow tile.
            group_size: query heads of a KV head.
            longest_us: what a pack takes at most.
            first_row_id: number of the row ids before the packs'.
        """
        is_short = (jobs.num_tokens == 1) & (jobs.shape == 0) & (jobs.kv_begin == jobs.prefix_len) & (num_parts > 0)
        is_short &= jobs.cost_us <= SHORT_STARTS * launch.narrow.tile_us
        size, num_short = 0, np.count_nonzero(is_short)
        if num_short:
            size = min(launch.narrow.rows // group_size, int(longest_us * num_short / jobs.cost_us[is_short].sum()))
        is_packed = is_short & (jobs.cost_us * size <= longest_us) & (size > 1)
        # A tile is the same part of all its rows: those of one pack have the same number of them.
        chosen = np.flatnonzero(is_packed)
        chosen = chosen[np.argsort(num_parts[chosen], kind="stable")]
        parts = num_parts[chosen]
        _, index_in_run = expand(np.bincount(parts))
        is_first = index_in_run % max(size, 1) == 0
        pack, starts = np.cumsum(is_first) - 1, np.flatnonzero(is_first)
        own_len = (jobs.kv_end - jobs.prefix_len)[chosen]
        num_blocks = cdiv(own_len, batch.block_size)
        first_block = np.cumsum(num_blocks) - num_blocks
        first_seen = (first_block - first_block[starts][pack]) * batch.block_size
        end_block = first_block + num_blocks
        own_entry = jobs.own_entry[chosen] - len(batch.prefix_block_ids)
        blocks = batch.suffix_block_table[np.repeat(own_entry - first_block, num_blocks) + np.arange(num_blocks.sum())]
        entries = whole_blocks(blocks)
        entries[end_block - 1] &= -1 << SLOT_BITS
        entries[end_block - 1] |= ((own_len - 1) % batch.block_size).astype(np.int32)
        num_members = np.bincount(pack)
        zeros = np.zeros(len(num_members), dtype=np.int64)
        cost_us = np.bincount(pack, weights=jobs.cost_us[chosen]) - (num_members - 1) * launch.narrow.tile_us
        rows = jobs.first_row_id[chosen]
        table_end = len(batch.prefix_block_ids) + len(batch.suffix_block_table)
        return cls(
            is_packed=is_packed,
            jobs=Jobs(
                first_row_id=first_row_id + starts,
                num_tokens=num_members,
                shape=zeros,
                kv_begin=zeros,
                kv_end=(first_seen + own_len)[starts + num_members - 1],
                prefix_len=zeros,
                prefix_entry=zeros,
                own_entry=table_end + first_block[starts],
                cost_us=cost_us,
            ),
            part=np.where(parts[starts] == 1, -1, parts[starts] - 1),
            rows=rows,
            first_seen=first_seen,
            positions=first_seen + own_len - 1,
            entries=entries,
        )


def whole_blocks(block_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Entries of blocks of which every slot may be read."""
    return (block_ids.astype(np.int32, copy=False) << SLOT_BITS) | ((1 << SLOT_BITS) - 1)


def _cost_us(launch: Launch, shape: Ints, num_read: Ints) -> Floats:
    """Of one tile each, its result not partial."""
    tile_us, token_us, _ = slot_costs(launch, shape)
    found: Floats = tile_us + num_read * token_us
    return found


def tokens_a_tile(launch: Launch, group_size: int) -> Ints:
    """Rows of the batch that a tile of each of the launch's shapes holds."""
    return np.array([shape.rows // group_size for shape in launch.shapes], dtype=np.int64)


def owners(counts: npt.NDArray[np.integer]) -> Ints:
    return np.repeat(np.arange(len(counts)), counts)


def expand(counts: npt.NDArray[np.integer]) -> tuple[Ints, Ints]:
    """For counts[i] items of each i: the i of every item, and its number within i."""
    owner = owners(counts)
    starts = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - starts[owner]
