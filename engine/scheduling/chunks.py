"""The work of one step in chunks: consecutive tokens of one request or prefix."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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
        """Adds a chunk. See `Chunks`."""
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
