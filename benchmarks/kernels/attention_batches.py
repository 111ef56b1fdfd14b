"""Makes an AttentionBatch with scattered KV blocks from sizes, for tests and measurements."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSize:
    """One prefix group of a step.

    Attributes:
        prefix_len: tokens of the shared prefix; 0 for none.
        members: (own_len, num_rows) of each sequence: its own KV tokens, of which the last num_rows are this step's.
    """

    prefix_len: int
    members: Sequence[tuple[int, int]]


def make_batch(groups: Sequence[GroupSize], block_size: int, *, seed: int = 0) -> tuple[AttentionBatch, int]:
    """A step with these groups, and how many KV blocks its block ids span.

    Block ids are drawn at random from a quarter more blocks than are needed, so that tables are not in order and some
    blocks are unused.
    """
    members = [member for group in groups for member in group.members]
    suffix_lens = np.array([own_len for own_len, _ in members], dtype=np.int64)
    num_rows = np.array([rows for _, rows in members], dtype=np.int64)
    prefix_lens = np.array([group.prefix_len for group in groups], dtype=np.int64)
    own_blocks, prefix_blocks = cdiv(suffix_lens, block_size), cdiv(prefix_lens, block_size)
    num_used = int(own_blocks.sum() + prefix_blocks.sum())
    num_blocks = num_used + num_used // 4 + 1
    block_ids = np.random.default_rng(seed).permutation(num_blocks)[:num_used].astype(np.int32)
    prefix_ids, own_ids = np.split(block_ids, [int(prefix_blocks.sum())])
    own_starts, cu_seqlens_q = _starts(own_blocks), _starts(num_rows)
    row = np.arange(num_rows.sum())
    sequence = np.repeat(np.arange(len(members)), num_rows)
    token = row - cu_seqlens_q[sequence] + (suffix_lens - num_rows)[sequence]
    return (
        AttentionBatch(
            cu_seqlens_q=cu_seqlens_q,
            suffix_lens=suffix_lens.astype(np.int32),
            suffix_block_starts=own_starts,
            suffix_block_table=own_ids,
            group_starts=_starts(np.array([len(group.members) for group in groups])),
            prefix_lens=prefix_lens.astype(np.int32),
            prefix_block_starts=_starts(prefix_blocks),
            prefix_block_ids=prefix_ids,
            slot_mapping=own_ids[own_starts[sequence] + token // block_size].astype(np.int64) * block_size
            + token % block_size,
            block_size=block_size,
        ),
        num_blocks,
    )


def _starts(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
