"""One step's ragged work as arrays: what the model and its attention are given."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Consecutive tokens of one request or prefix that are computed in this step.

    Attributes:
        token_ids: int32 ``[n]``, n >= 1.
        position: of the first token in its prompt.
        num_earlier: own KV tokens before the chunk (a prefix chunk's own KV begins at the prompt's first token).
        block_ids: int32, block table of the own KV; holds at least num_earlier + n tokens.
        output_rows: how many of the chunk's last rows go on to the output layer.
    """

    token_ids: npt.NDArray[np.int32]
    position: int
    num_earlier: int
    block_ids: npt.NDArray[np.int32]
    output_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkGroup:
    """Chunks that attend to one prefix; an empty one for chunks that share nothing."""

    prefix_block_ids: npt.NDArray[np.int32]
    prefix_length: int
    chunks: Sequence[Chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """No padding: T rows, T the sum of the chunks' lengths (prepacking's independent masks and restarting positions).

    Attributes:
        input_ids: int64 ``[T]``. A negative one, -1 - row, is the token that the step before has sampled in that of its
            sampled rows, where the host does not know it yet.
        positions: int64 ``[T]``, each row's place in its own prompt.
        output_rows: int64 ``[R]``, rows whose hidden state goes on, in the order of the chunks.
        attention: who attends to what.
    """

    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    output_rows: npt.NDArray[np.int64]
    attention: AttentionBatch

    @property
    def has_pending_tokens(self) -> bool:
        """Whether there are tokens that only the device knows."""
        return bool((self.input_ids < 0).any())


def build_token_batch(groups: Sequence[ChunkGroup], block_size: int) -> TokenBatch:
    """Lays the chunks of all groups out in order: one pass over chunks, array arithmetic over tokens."""
    chunks = [chunk for group in groups for chunk in group.chunks]
    lengths = np.array([len(chunk.token_ids) for chunk in chunks])
    earlier = np.array([chunk.num_earlier for chunk in chunks])
    outputs = np.array([chunk.output_rows for chunk in chunks])
    suffix_lens = earlier + lengths
    cu_seqlens_q = _starts(lengths)
    # A request's table may reserve blocks beyond its last token: those are not read.
    num_blocks = cdiv(suffix_lens, block_size)
    block_starts = _starts(num_blocks)
    block_ids = np.concatenate([chunk.block_ids[:count] for chunk, count in zip(chunks, num_blocks, strict=True)])
    row_of_chunk = np.arange(cu_seqlens_q[-1]) - np.repeat(cu_seqlens_q[:-1], lengths)
    own_position = row_of_chunk + np.repeat(earlier, lengths)
    entry = np.repeat(block_starts[:-1], lengths) + own_position // block_size
    output_chunk = np.repeat(np.arange(len(chunks)), outputs)
    output_offset = np.arange(len(output_chunk)) - np.repeat(_starts(outputs)[:-1], outputs)
    return TokenBatch(
        input_ids=np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int64),
        positions=row_of_chunk + np.repeat(np.array([chunk.position for chunk in chunks]), lengths),
        output_rows=cu_seqlens_q[output_chunk + 1] - outputs[output_chunk] + output_offset,
        attention=AttentionBatch(
            cu_seqlens_q=cu_seqlens_q.astype(np.int32),
            suffix_lens=suffix_lens.astype(np.int32),
            suffix_block_starts=block_starts.astype(np.int32),
            suffix_block_table=block_ids,
            group_starts=_starts(np.array([len(group.chunks) for group in groups])).astype(np.int32),
            prefix_lens=np.array([group.prefix_length for group in groups], dtype=np.int32),
            prefix_block_starts=_starts(np.array([len(group.prefix_block_ids) for group in groups])).astype(np.int32),
            prefix_block_ids=np.concatenate([group.prefix_block_ids for group in groups]),
            slot_mapping=block_ids[entry].astype(np.int64) * block_size + own_position % block_size,
            block_size=block_size,
        ),
    )


def _starts(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Offsets of consecutive ranges, the total at the end."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts
