"""One step's ragged work as arrays: the input of the model and its attention."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch

Int32 = npt.NDArray[np.int32]


@dataclass(slots=True)
class Chunks:
    """The chunks of one step, as columns. A chunk is consecutive tokens of one request or prefix.

    Attributes:
        token_ids: int32 ``[n]``, n >= 1.
        first_positions: position of the first token in its prompt.
        num_earlier: own KV tokens before the chunk (a prefix chunk's own KV begins at the prompt's first token).
        block_tables: int32, of the own KV; covers at least num_earlier + n tokens.
        num_output_rows: number of the chunk's last rows that go through the output layer.
    """

    token_ids: list[Int32] = field(default_factory=list)
    first_positions: list[int] = field(default_factory=list)
    num_earlier: list[int] = field(default_factory=list)
    block_tables: list[Int32] = field(default_factory=list)
    num_output_rows: list[int] = field(default_factory=list)

    def add(
        self, token_ids: Int32, first_position: int, num_earlier: int, block_table: Int32, num_output_rows: int
    ) -> None:
        """Adds a chunk that begins at `first_position` of a sequence with this `block_table`. See `Chunks`."""
        self.token_ids.append(token_ids)
        self.first_positions.append(first_position)
        self.num_earlier.append(num_earlier)
        self.block_tables.append(block_table)
        self.num_output_rows.append(num_output_rows)


class ChunkGroup(NamedTuple):
    """Consecutive chunks that attend to one prefix, which is empty where they share nothing."""

    prefix_block_ids: Int32
    prefix_length: int
    num_chunks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """T rows without padding, T the sum of the chunks' lengths (prepacking's independent masks, restarting positions).

    Attributes:
        input_ids: int64 ``[T]``. A negative id, -1 - row, stands for a token that the host does not know yet: the one
            that the step before samples in this row of `Step.sampled`.
        positions: int64 ``[T]``, each row's position in its own prompt.
        output_rows: int64 ``[R]``, rows that go through the output layer, in the order of the chunks.
        attention: which rows attend to which KV.
        more_attention: the same with the block tables of other layers (`KVLayout`), in the order of the tables.
    """

    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    output_rows: npt.NDArray[np.int64]
    attention: AttentionBatch
    more_attention: Sequence[AttentionBatch] = ()

    @property
    def has_pending_tokens(self) -> bool:
        """Whether some input tokens are known only to the device."""
        return bool((self.input_ids < 0).any())


def build_token_batch(chunks: Chunks, groups: Sequence[ChunkGroup], block_size: int) -> TokenBatch:
    """Lays chunks out as rows, group by group, each of at least one chunk, for blocks of `block_size`. See `Chunks`."""
    lengths = np.fromiter(map(len, chunks.token_ids), dtype=np.int64)
    earlier = np.array(chunks.num_earlier)
    outputs = np.array(chunks.num_output_rows)
    suffix_lens = earlier + lengths
    cu_seqlens_q = _starts(lengths)
    # Blocks that a table reserves beyond the last token are left out.
    num_blocks = cdiv(suffix_lens, block_size)
    block_starts = _starts(num_blocks)
    table_starts = _starts(np.fromiter(map(len, chunks.block_tables), dtype=np.int64))
    read_from = np.arange(block_starts[-1]) + np.repeat(table_starts[:-1] - block_starts[:-1], num_blocks)
    block_ids = np.concatenate(chunks.block_tables)[read_from]
    row_of_chunk = np.arange(cu_seqlens_q[-1]) - np.repeat(cu_seqlens_q[:-1], lengths)
    own_position = row_of_chunk + np.repeat(earlier, lengths)
    entry = np.repeat(block_starts[:-1], lengths) + own_position // block_size
    first_outputs = np.repeat(cu_seqlens_q[1:] - outputs - _starts(outputs)[:-1], outputs)
    prefix_block_ids = np.concatenate([block_ids[:0], *(g.prefix_block_ids for g in groups if g.prefix_length)])
    common: dict[str, Any] = {
        "cu_seqlens_q": cu_seqlens_q.astype(np.int32),
        "suffix_lens": suffix_lens.astype(np.int32),
        "suffix_block_starts": block_starts.astype(np.int32),
        "group_starts": _starts(np.array([group.num_chunks for group in groups])).astype(np.int32),
        "prefix_lens": np.array([group.prefix_length for group in groups], dtype=np.int32),
        "prefix_block_starts": _starts(np.array([len(group.prefix_block_ids) for group in groups])).astype(np.int32),
        "block_size": block_size,
    }
    attention = [
        AttentionBatch(
            suffix_block_table=own_table,
            prefix_block_ids=prefix_table,
            slot_mapping=own_table[entry].astype(np.int64) * block_size + own_position % block_size,
            **common,
        )
        for own_table, prefix_table in zip(_tables(block_ids), _tables(prefix_block_ids), strict=True)
    ]
    return TokenBatch(
        input_ids=np.concatenate(chunks.token_ids).astype(np.int64),
        positions=row_of_chunk + np.repeat(np.array(chunks.first_positions), lengths),
        output_rows=first_outputs + np.arange(len(first_outputs)),
        attention=attention[0],
        more_attention=tuple(attention[1:]),
    )


def _tables(block_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """``[n]``, or ``[n, tables]`` of several tables, -> ``[tables, n]``; freed blocks (-1), never read, become 0."""
    return block_ids[None] if block_ids.ndim == 1 else np.maximum(block_ids, 0).T.copy()


def _starts(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Offsets of consecutive ranges, the total at the end."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts
