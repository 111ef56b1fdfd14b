"""The work list: one step's attention cut into tiles, one per program and KV head, built once and used by every layer.

A *prefix tile* holds rows of any members of a group against (a split of) the group's prefix. An *own tile* holds
consecutive rows of one sequence against (a split of) its own KV, or, where its prefix is not shared, against prefix and
own KV in one go. A row with one tile is finished by it. A row with several has partial results, merged by whichever
tile finishes last: its `num_parts` says how many there are, its `first_part` where they lie. (BatchLLM section 4.4.)

Tiles are sorted by cost, the longest first: programs start in that order, and the short ones fill the gaps at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.triton.cost_model import Choice, Floats, Ints, SharePolicy, choose, sizes_of, tile_us
from engine.kernels.triton.tuned import Launch, TunedAttention


class TileField(IntEnum):
    """Columns of WorkList.tiles."""

    FIRST_ROW_ID = 0  # into row_ids
    NUM_TOKENS = 1  # rows of the batch; 0 is a tile without work
    IS_WIDE = 2
    KV_BEGIN = 3  # positions in the sequence, the prefix counted
    KV_END = 4
    PREFIX_LEN = 5
    PREFIX_ENTRY = 6  # into block_table
    OWN_ENTRY = 7
    PART = 8  # which part of its rows this is; -1: all of them
    WIDTH = 12  # columns in all: a multiple of 16 bytes


class RowField(IntEnum):
    """Columns of WorkList.rows."""

    POSITION = 0  # in the sequence, the prefix counted
    FIRST_PART = 1  # of the step's partial results
    NUM_PARTS = 2
    WIDTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkList:
    """One step's tiles on the host, all int32.

    Attributes:
        launch: the compiled kernel it was cut for.
        tiles: ``[num_tiles, TileField.WIDTH]``.
        row_ids: rows of the batch, as tiles refer to them: first 0..T-1, then each shared group's rows.
        rows: ``[T, RowField.WIDTH]``.
        block_table: the prefixes' entries, then the sequences'.
        num_partials: partial results of the step, each ``[num_q_heads, head_dim]``.
        num_prefix_tiles: how many of the tiles are prefix tiles.
        tile_us: float64 ``[num_tiles]``, what each should cost.
    """

    launch: Launch
    tiles: npt.NDArray[np.int32]
    row_ids: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int32]
    block_table: npt.NDArray[np.int32]
    num_partials: int
    num_prefix_tiles: int
    tile_us: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class _Jobs:
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


def build_work_list(
    batch: AttentionBatch,
    tuned: TunedAttention,
    *,
    group_size: int,
    num_kv_heads: int,
    num_processors: int,
    policy: SharePolicy,
    launches: Sequence[Launch],
) -> WorkList:
    """Cuts a step into tiles, under whichever of the launches should take the least time.

    Args:
        group_size: query heads per KV head.
        num_processors: of the device that will run it.
    """
    choices = [
        choose(batch, launch, group_size=group_size, policy=policy, share_margin=tuned.share_margin)
        for launch in launches
    ]
    choice = min(choices, key=lambda found: found.total_us / found.launch.programs_per_processor)
    num_slots = num_processors * choice.launch.programs_per_processor
    # A tile longer than this would still run when the others have finished.
    longest_us = tuned.balance * choice.total_us * num_kv_heads / num_slots
    own_jobs = _own_jobs(batch, choice, group_size)
    prefix_jobs, prefix_row_ids, job_group = _prefix_jobs(batch, choice, group_size)
    own, prefix = (
        _Splits.of(jobs, batch.block_size, choice.launch, longest_us, tuned.min_split_tokens)
        for jobs in (own_jobs, prefix_jobs)
    )
    sequence, group = _owners(sizes_of(batch.cu_seqlens_q)), _owners(sizes_of(batch.group_starts))
    # All tiles of a group's prefix have the same range and shape, so the same number of splits.
    group_parts = np.zeros(batch.num_groups, dtype=np.int64)
    group_parts[job_group] = prefix.num_splits
    sequence_parts = np.where(choice.is_shared, group_parts[group], 0)
    job_of_row = _owners(own_jobs.num_tokens)
    prefix_parts = sequence_parts[sequence]
    num_parts = own.num_splits[job_of_row] + prefix_parts
    stored_parts = np.where(num_parts > 1, num_parts, 0)
    first_of_sequence = batch.cu_seqlens_q[:-1].astype(np.int64)
    num_earlier = batch.suffix_lens - sizes_of(batch.cu_seqlens_q) + batch.prefix_lens[group]
    num_rows = batch.num_rows

    rows = np.zeros((num_rows, RowField.WIDTH), dtype=np.int32)
    rows[:, RowField.POSITION] = np.arange(num_rows) + (num_earlier - first_of_sequence)[sequence]
    rows[:, RowField.FIRST_PART] = np.cumsum(stored_parts) - stored_parts
    rows[:, RowField.NUM_PARTS] = num_parts

    job_prefix_parts = prefix_parts[own_jobs.first_row_id]
    is_direct = (own.num_splits + job_prefix_parts == 1)[own.job]
    own_part = np.where(is_direct, -1, job_prefix_parts[own.job] + own.index)
    tiles = np.concatenate([_tiles(own_jobs, own, own_part), _tiles(prefix_jobs, prefix, prefix.index)])
    cost_us = np.concatenate([own.cost_us, prefix.cost_us])
    order = np.argsort(-cost_us, kind="stable")
    return WorkList(
        launch=choice.launch,
        tiles=tiles[order],
        row_ids=np.concatenate([np.arange(num_rows, dtype=np.int32), prefix_row_ids.astype(np.int32)]),
        rows=rows,
        block_table=np.concatenate([batch.prefix_block_ids, batch.suffix_block_table]).astype(np.int32, copy=False),
        num_partials=int(stored_parts.sum()),
        num_prefix_tiles=len(prefix.job),
        tile_us=cost_us[order],
    )


def _own_jobs(batch: AttentionBatch, choice: Choice, group_size: int) -> _Jobs:
    """Every sequence's rows, in tiles of its shape; in row order."""
    num_rows = sizes_of(batch.cu_seqlens_q)
    group = _owners(sizes_of(batch.group_starts))
    tokens = _tokens_a_tile(choice.launch, group_size)[choice.own_shape]
    num_tiles = cdiv(num_rows, tokens)
    sequence, index = _expand(num_tiles)
    tokens, num_rows, group = tokens[sequence], num_rows[sequence], group[sequence]
    num_tokens = np.minimum(tokens, num_rows - index * tokens)
    prefix_len = batch.prefix_lens[group].astype(np.int64)
    is_shared = choice.is_shared[sequence]
    own_end = batch.suffix_lens[sequence] - num_rows + index * tokens + num_tokens
    # The sequence's last tile reads its own KV first; what it shares with the others, they read again.
    is_first_read = index == num_tiles[sequence] - 1
    num_fresh = np.where(is_first_read, own_end, 0)
    num_reread = own_end - num_fresh + np.where(is_shared, 0, prefix_len)
    return _Jobs(
        first_row_id=batch.cu_seqlens_q[sequence] + index * tokens,
        num_tokens=num_tokens,
        shape=choice.own_shape[sequence],
        kv_begin=np.where(is_shared, prefix_len, 0),
        kv_end=prefix_len + own_end,
        prefix_len=prefix_len,
        prefix_entry=batch.prefix_block_starts[group].astype(np.int64),
        own_entry=len(batch.prefix_block_ids) + batch.suffix_block_starts[sequence].astype(np.int64),
        cost_us=_cost_us(choice.launch, choice.own_shape[sequence], num_fresh, num_reread),
    )


def _prefix_jobs(batch: AttentionBatch, choice: Choice, group_size: int) -> tuple[_Jobs, Ints, Ints]:
    """The shared rows of each group, in tiles of its shape: jobs, row ids that follow the batch's own, jobs' groups."""
    num_rows = np.where(choice.is_shared, sizes_of(batch.cu_seqlens_q), 0)
    group_of_sequence = _owners(sizes_of(batch.group_starts))
    sequence, offset = _expand(num_rows)
    row_ids = batch.cu_seqlens_q[sequence] + offset
    rows_of_group = np.bincount(group_of_sequence, weights=num_rows, minlength=batch.num_groups).astype(np.int64)
    tokens = _tokens_a_tile(choice.launch, group_size)[choice.prefix_shape]
    group, index = _expand(cdiv(rows_of_group, tokens))
    tokens = tokens[group]
    prefix_len = batch.prefix_lens[group].astype(np.int64)
    first_of_group = batch.num_rows + np.cumsum(rows_of_group) - rows_of_group
    # One reads it from memory, the others again: the same cost for each, so that all are split alike.
    num_fresh = prefix_len / cdiv(rows_of_group[group], tokens)
    jobs = _Jobs(
        first_row_id=first_of_group[group] + index * tokens,
        num_tokens=np.minimum(tokens, rows_of_group[group] - index * tokens),
        shape=choice.prefix_shape[group],
        kv_begin=np.zeros(len(group), dtype=np.int64),
        kv_end=prefix_len,
        prefix_len=prefix_len,
        prefix_entry=batch.prefix_block_starts[group].astype(np.int64),
        own_entry=np.zeros(len(group), dtype=np.int64),
        cost_us=_cost_us(choice.launch, choice.prefix_shape[group], num_fresh, prefix_len - num_fresh),
    )
    return jobs, row_ids, group


@dataclass(frozen=True, slots=True, kw_only=True)
class _Splits:
    """KV ranges of jobs, cut into tiles.

    Attributes:
        num_splits: int64, per job.
        job, index: int64 per tile, its job and which of the job's splits it is.
        begin, end: int64 per tile, positions.
        cost_us: float64 per tile.
    """

    num_splits: Ints
    job: Ints
    index: Ints
    begin: Ints
    end: Ints
    cost_us: Floats

    @classmethod
    def of(cls, jobs: _Jobs, block_size: int, launch: Launch, longest_us: float, min_split_tokens: int) -> "_Splits":
        """Cuts ranges that take longer than longest_us, at whole blocks and whole loop steps of the tile's shape."""
        steps = np.array([np.lcm(shape.tokens, block_size) for shape in launch.shapes], dtype=np.int64)[jobs.shape]
        # Count as if the prefix's last block were full: then blocks and steps are multiples of the same unit all along.
        hole = -jobs.prefix_len % block_size
        begin = np.where(jobs.kv_begin > 0, jobs.kv_begin + hole, 0)
        end = np.where(jobs.kv_end > jobs.prefix_len, jobs.kv_end + hole, jobs.kv_end)
        length = end - begin
        wanted = np.ceil(jobs.cost_us / max(longest_us, 1e-9))
        most = np.maximum(length // min_split_tokens, 1)
        chunk = cdiv(length, np.minimum(wanted, most).astype(np.int64).clip(1))
        chunk = cdiv(chunk, steps) * steps
        num_splits = cdiv(length, chunk)
        job, index = _expand(num_splits)

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


def _tiles(jobs: _Jobs, splits: _Splits, part: Ints) -> npt.NDArray[np.int32]:
    tiles = np.zeros((len(splits.job), TileField.WIDTH), dtype=np.int32)
    for field, values in (
        (TileField.FIRST_ROW_ID, jobs.first_row_id),
        (TileField.NUM_TOKENS, jobs.num_tokens),
        (TileField.IS_WIDE, jobs.shape),
        (TileField.PREFIX_LEN, jobs.prefix_len),
        (TileField.PREFIX_ENTRY, jobs.prefix_entry),
        (TileField.OWN_ENTRY, jobs.own_entry),
    ):
        tiles[:, field] = values[splits.job]
    tiles[:, TileField.KV_BEGIN] = splits.begin
    tiles[:, TileField.KV_END] = splits.end
    tiles[:, TileField.PART] = part
    return tiles


def _cost_us(launch: Launch, shape: Ints, num_fresh: Ints | Floats, num_reread: Ints | Floats) -> Floats:
    one = np.ones(len(shape), dtype=np.int64)
    return np.choose(shape, [tile_us(found, one, num_fresh, num_reread) for found in launch.shapes])


def _tokens_a_tile(launch: Launch, group_size: int) -> Ints:
    """Rows of the batch that a tile of each of the launch's shapes holds."""
    return np.array([shape.rows // group_size for shape in launch.shapes], dtype=np.int64)


def _owners(counts: npt.NDArray[np.integer]) -> Ints:
    return np.repeat(np.arange(len(counts)), counts)


def _expand(counts: npt.NDArray[np.integer]) -> tuple[Ints, Ints]:
    """For counts[i] items of each i: the i of every item, and its number within i."""
    owner = _owners(counts)
    starts = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - starts[owner]
