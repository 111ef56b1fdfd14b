"""The ragged description of one step's attention: the contract between the engine and every attention backend."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """Which rows of one token batch attend to which KV. Arrays are in host memory; backends copy what they need.

    The batch has T query rows (tokens), in S sequences, in G groups. Rows of a sequence are consecutive, and so
    are the sequences of a group. A row attends to all of its group's prefix (full mask) and to its sequence's own
    KV up to and including itself (causal: row i of n of sequence s sees suffix_lens[s] - n + i + 1 own tokens).
    A shared prefix that is being computed is a sequence too, in a group with no prefix or with its ancestor's.

    Attributes:
        cu_seqlens_q: int32 ``[S + 1]``, first row of each sequence; the last entry is T. No sequence is empty.
        suffix_lens: int32 ``[S]``, own KV tokens, including those written in this step.
        suffix_block_starts: int32 ``[S + 1]`` into suffix_block_table.
        suffix_block_table: int32, block table entries of all sequences, concatenated.
        group_starts: int32 ``[G + 1]``, first sequence of each group; the last entry is S.
        prefix_lens: int32 ``[G]``, prefix KV tokens; 0 where nothing is shared.
        prefix_block_starts, prefix_block_ids: int32, ``[G + 1]`` starts in the block table entries of all prefixes.
        slot_mapping: int64 ``[T]``, where each row's key and value are written: block id * block_size + offset.
    """

    cu_seqlens_q: npt.NDArray[np.int32]
    suffix_lens: npt.NDArray[np.int32]
    suffix_block_starts: npt.NDArray[np.int32]
    suffix_block_table: npt.NDArray[np.int32]
    group_starts: npt.NDArray[np.int32]
    prefix_lens: npt.NDArray[np.int32]
    prefix_block_starts: npt.NDArray[np.int32]
    prefix_block_ids: npt.NDArray[np.int32]
    slot_mapping: npt.NDArray[np.int64]
    block_size: int

    @property
    def num_rows(self) -> int:
        return int(self.cu_seqlens_q[-1])

    @property
    def num_groups(self) -> int:
        return len(self.prefix_lens)
