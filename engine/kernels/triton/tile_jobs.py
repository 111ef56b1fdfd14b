"""Jobs, which are a step's tiles before their KV ranges are split, and packs of short jobs.

Decode rows with short own KV give many tiny tiles, each with a start-up, a query load and a store for a few KV blocks.
A *packed tile* computes several of them: it reads the blocks of one sequence after those of another in one loop, and
uses rows of the matrix product that a single query would leave empty. Packs are kept so small that every program slot
stays busy until the end.
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
"""Bits of a block table entry that hold the last slot of the block that may be read; the others hold the block id."""

MOST_BLOCKS = 1 << (31 - SLOT_BITS)
"""Most blocks of a KV cache, so that an entry fits int32."""

SHORT_STARTS = 4
"""A job is short if it takes at most as long as so many tile starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Tiles before their KV ranges are split. Attributes are int64 arrays over the jobs; cost_us is float64."""

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
        """The jobs with these indices."""
        return Jobs(**{name: getattr(self, name)[index] for name in Jobs.__slots__})


def own_jobs(batch: AttentionBatch, sizes: StepSizes, choice: Choice, group_size: int) -> Jobs:
    """The rows of every sequence in tiles of the chosen shape, in row order. See `Choice` and `choose`."""
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
    """The shared rows of each group in tiles of its shape: the jobs, the row ids that follow those of the batch's rows,
    and the group of each job. See `own_jobs`."""
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
    """Packed tiles of short jobs of one row each. Positions in a pack are relative to its first block.

    Attributes:
        is_packed: bool, per own job, whether it is in a pack.
        jobs: the packs, none of which is split; their row ids follow all others.
        part: int64, per pack, the index of its part in its rows' attention; -1: it is all of it.
        rows: int64, the packs' rows of the batch.
        first_seen, positions: int64, per row, the first and the last position of its own KV in its pack.
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
        """Packs short jobs of one row and narrow shape that read only own KV and are not split. A job has the number of
        parts of its rows' attention, 0 if it is itself split. A pack takes at most longest_us; its row ids begin at
        first_row_id. See `own_jobs`."""
        is_short = (jobs.num_tokens == 1) & (jobs.shape == 0) & (jobs.kv_begin == jobs.prefix_len) & (num_parts > 0)
        is_short &= jobs.cost_us <= SHORT_STARTS * launch.narrow.tile_us
        size, num_short = 0, np.count_nonzero(is_short)
        if num_short:
            size = min(launch.narrow.rows // group_size, int(longest_us * num_short / jobs.cost_us[is_short].sum()))
        is_packed = is_short & (jobs.cost_us * size <= longest_us) & (size > 1)
        # A tile has one part index for all its rows: the rows of a pack must have the same number of parts.
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
    """Block table entries that allow every slot of their block."""
    return (block_ids.astype(np.int32, copy=False) << SLOT_BITS) | ((1 << SLOT_BITS) - 1)


def _cost_us(launch: Launch, shape: Ints, num_read: Ints) -> Floats:
    """The time of tiles with num_read KV tokens, whose results are not partial."""
    tile_us, token_us, _ = slot_costs(launch, shape)
    found: Floats = tile_us + num_read * token_us
    return found


def tokens_a_tile(launch: Launch, group_size: int) -> Ints:
    """Rows of the batch per tile, for each of the launch's shapes."""
    return np.array([shape.rows // group_size for shape in launch.shapes], dtype=np.int64)


def owners(counts: npt.NDArray[np.integer]) -> Ints:
    """For counts[i] items of each i: the i of every item."""
    return np.repeat(np.arange(len(counts)), counts)


def expand(counts: npt.NDArray[np.integer]) -> tuple[Ints, Ints]:
    """For counts[i] items of each i: the i of every item, and its index among them."""
    owner = owners(counts)
    starts = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - starts[owner]
