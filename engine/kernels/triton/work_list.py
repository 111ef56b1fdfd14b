"""The work list: one step's attention split into tiles, built once and used by every layer.

A *prefix tile* has rows of any members of a group against (a split of) the group's prefix. An *own tile* has
consecutive rows of one sequence against (a split of) its own KV; if its prefix is not shared, against prefix and own
KV. A row with one tile gets its result from it. A row with several has partial results, which the tile that finishes
last merges: `num_parts` is their number, `first_part` the index of the first (BatchLLM section 4.4). A *packed tile*
has decode rows of several sequences, each against its own KV (tile_jobs.py).

Tiles are sorted by time, the longest first: programs start in this order, so short tiles fill the gaps at the end.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.triton.cost_model import SharePolicy, StepSizes, choose
from engine.kernels.triton.tile_jobs import Jobs, Packs, expand, own_jobs, owners, prefix_jobs, whole_blocks
from engine.kernels.triton.tile_ranges import Floats, Ints
from engine.kernels.triton.tuned import Launch, TunedAttention


class TileField(IntEnum):
    """Columns of WorkList.tiles."""

    FIRST_ROW_ID = 0  # into row_ids
    NUM_TOKENS = 1  # rows of the batch; 0: no work
    IS_WIDE = 2
    KV_BEGIN = 3  # positions in the sequence, prefix included
    KV_END = 4
    PREFIX_LEN = 5
    PREFIX_ENTRY = 6  # into block_table
    OWN_ENTRY = 7
    PART = 8  # index of this part of its rows' attention; -1: it is all of it
    POSITION_AT = 9  # the RowField of the position to use; the next field is the first position seen
    WIDTH = 12  # number of columns: a multiple of 16 bytes


class RowField(IntEnum):
    """Columns of WorkList.rows."""

    POSITION = 0  # in the sequence, prefix included
    FIRST_SEEN = 1  # 0
    PACKED_POSITION = 2  # in a packed tile
    PACKED_FIRST_SEEN = 3
    FIRST_PART = 4  # index into the step's partial results
    NUM_PARTS = 5
    WIDTH = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkList:
    """One step's tiles on the host, all int32.

    Attributes:
        launch: the compiled kernel for which the tiles are made.
        tiles: ``[num_tiles, TileField.WIDTH]``.
        row_ids: rows of the batch, in the order of tiles: 0..T-1, then each shared group's rows, then the packs' rows.
        rows: ``[T, RowField.WIDTH]``.
        block_table: entries of the prefixes, then the sequences, then the packs (see `SLOT_BITS` in tile_jobs.py).
        num_partials: number of partial results of the step, each ``[num_q_heads, head_dim]``.
        tile_us: float64 ``[num_tiles]``, the predicted time of each.
    """

    launch: Launch
    tiles: npt.NDArray[np.int32]
    row_ids: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    num_partials: int
    num_prefix_tiles: int
    tile_us: Floats


def build_work_list(
    batch: AttentionBatch, tuned: TunedAttention, *, group_size: int, num_kv_heads: int, policy: SharePolicy
) -> WorkList:
    """Splits a step into tiles, for the launch with the shortest predicted time.

    Args:
        tuned, group_size, policy: see `choose`.
    """
    sizes = StepSizes.of(batch)
    choice = choose(sizes, tuned, group_size=group_size, num_kv_heads=num_kv_heads, policy=policy)
    owns = own_jobs(batch, sizes, choice, group_size)
    prefixes, prefix_row_ids, job_group = prefix_jobs(batch, sizes, choice, group_size)
    own, prefix = (
        _Splits.of(jobs, batch.block_size, choice.launch, choice.longest_us, tuned.min_split_tokens)
        for jobs in (owns, prefixes)
    )
    sequence, group = owners(sizes.num_rows), sizes.group
    # All jobs of a group's prefix have the same range and shape, so the same number of splits.
    group_parts = np.zeros(batch.num_groups, dtype=np.int64)
    group_parts[job_group] = prefix.num_splits
    sequence_parts = np.where(choice.is_shared, group_parts[group], 0)
    job_of_row = owners(owns.num_tokens)
    prefix_parts = sequence_parts[sequence]
    num_parts = own.num_splits[job_of_row] + prefix_parts
    stored_parts = np.where(num_parts > 1, num_parts, 0)
    first_of_sequence = batch.cu_seqlens_q[:-1].astype(np.int64)
    num_earlier = sizes.suffix_lens - sizes.num_rows + sizes.prefix
    num_rows = batch.num_rows

    rows = np.zeros((num_rows, RowField.WIDTH), dtype=np.int32)
    rows[:, RowField.POSITION] = np.arange(num_rows) + (num_earlier - first_of_sequence)[sequence]
    rows[:, RowField.FIRST_PART] = np.cumsum(stored_parts) - stored_parts
    rows[:, RowField.NUM_PARTS] = num_parts

    job_prefix_parts = prefix_parts[owns.first_row_id]
    is_direct = (own.num_splits + job_prefix_parts == 1)[own.job]
    own_part = np.where(is_direct, -1, job_prefix_parts[own.job] + own.index)
    packs = Packs.of(
        owns, np.where(own.num_splits == 1, job_prefix_parts + 1, 0), batch, choice.launch, group_size,
        longest_us=choice.slot_us / 2, first_row_id=num_rows + len(prefix_row_ids),
    )  # fmt: skip
    rows[packs.rows, RowField.PACKED_POSITION] = packs.positions
    rows[packs.rows, RowField.PACKED_FIRST_SEEN] = packs.first_seen
    alone = np.flatnonzero(~packs.is_packed[own.job])
    packed_tiles = _tiles(packs.jobs, packs.jobs.kv_begin, packs.jobs.kv_end, packs.part)
    packed_tiles[:, TileField.POSITION_AT] = RowField.PACKED_POSITION
    prefix_tiles = _tiles(prefixes.take(prefix.job), prefix.begin, prefix.end, prefix.index)
    own_tiles = _tiles(owns.take(own.job[alone]), own.begin[alone], own.end[alone], own_part[alone])
    tiles = np.concatenate([own_tiles, prefix_tiles, packed_tiles])
    cost_us = np.concatenate([own.cost_us[alone], prefix.cost_us, packs.jobs.cost_us])
    order = np.argsort(-cost_us, kind="stable")
    return WorkList(
        launch=choice.launch,
        tiles=tiles[order],
        row_ids=np.concatenate([np.arange(num_rows), prefix_row_ids, packs.rows]).astype(np.int32),
        rows=rows,
        block_table=np.concatenate(
            [whole_blocks(batch.prefix_block_ids), whole_blocks(batch.suffix_block_table), packs.entries]
        ),
        num_partials=int(stored_parts.sum()),
        num_prefix_tiles=len(prefix.job),
        tile_us=cost_us[order],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Splits:
    """Tiles, which are jobs with their KV ranges split: int64 `num_splits` per job, and per tile its int64 job, its
    index among the job's splits, its int64 begin and end positions, and its float64 cost."""

    num_splits: Ints
    job: Ints
    index: Ints
    begin: Ints
    end: Ints
    cost_us: Floats

    @classmethod
    def of(cls, jobs: Jobs, block_size: int, launch: Launch, longest_us: float, min_split_tokens: int) -> "_Splits":
        """Splits ranges that take longer than longest_us, at multiples of the block and of the loop iteration."""
        numbers = np.arange(len(jobs.cost_us))
        if (jobs.cost_us <= longest_us).all():
            once = np.ones_like(numbers)
            return cls(
                num_splits=once, job=numbers, index=once - 1, begin=jobs.kv_begin, end=jobs.kv_end, cost_us=jobs.cost_us
            )
        steps = np.array([np.lcm(shape.tokens, block_size) for shape in launch.shapes], dtype=np.int64)[jobs.shape]
        # Positions as if the prefix's last block were full, so that blocks and iterations align in prefix and own KV.
        hole = -jobs.prefix_len % block_size
        begin = np.where(jobs.kv_begin > 0, jobs.kv_begin + hole, 0)
        end = np.where(jobs.kv_end > jobs.prefix_len, jobs.kv_end + hole, jobs.kv_end)
        length = end - begin
        wanted = np.ceil(jobs.cost_us / max(longest_us, 1e-9))
        most = np.maximum(length // min_split_tokens, 1)
        chunk = cdiv(length, np.minimum(wanted, most).astype(np.int64).clip(1))
        chunk = cdiv(chunk, steps) * steps
        num_splits = cdiv(length, chunk)
        job, index = expand(num_splits)

        def position(padded: Ints) -> Ints:
            prefix_len = jobs.prefix_len[job]
            return np.where(padded < prefix_len, padded, np.maximum(padded - hole[job], prefix_len))

        first = begin[job] + index * chunk[job]
        last = np.minimum(first + chunk[job], end[job])
        return cls(
            num_splits=num_splits,
            job=job,
            index=index,
            begin=position(first),
            end=np.where(last == end[job], jobs.kv_end[job], position(last)),
            cost_us=jobs.cost_us[job] * (last - first) / length[job],
        )


def _tiles(jobs: Jobs, begin: Ints, end: Ints, part: Ints) -> npt.NDArray[np.int32]:
    """The rows of `WorkList.tiles` for jobs and their ranges of positions."""
    tiles = np.zeros((len(begin), TileField.WIDTH), dtype=np.int32)
    for field, values in (
        (TileField.FIRST_ROW_ID, jobs.first_row_id),
        (TileField.NUM_TOKENS, jobs.num_tokens),
        (TileField.IS_WIDE, jobs.shape),
        (TileField.KV_BEGIN, begin),
        (TileField.KV_END, end),
        (TileField.PREFIX_LEN, jobs.prefix_len),
        (TileField.PREFIX_ENTRY, jobs.prefix_entry),
        (TileField.OWN_ENTRY, jobs.own_entry),
        (TileField.PART, part),
    ):
        tiles[:, field] = values
    return tiles
