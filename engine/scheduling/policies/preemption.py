"""What becomes of a request that loses its KV memory, and the host memory that may keep its KV for it.

"recompute"
    its KV is dropped; the prompt and what was generated are computed again later.
"swap"
    its KV is copied to host memory and back, while a budget of host blocks lasts; beyond it, recompute.
"kill"
    it ends with an error. The last request that runs is never killed: alone it fits once idle prefixes are gone.
"""

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.scheduling.sequence import Sequence


class BlockStore(Protocol):
    """KV memory whose blocks can be taken out and put back, here or by another process."""

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> Any:
        """A copy of the blocks' KV in host memory."""

    def write_blocks(self, block_ids: npt.NDArray[np.int32], kv: Any) -> None:
        """Writes what `read_blocks` gave into as many blocks."""


class SwapSpace:
    """Own KV of preempted requests, in host memory. With no blocks it keeps nothing, and all is recomputed.

    Args:
        store: the KV memory that blocks are copied from and to.
        num_blocks: most blocks that are kept at once.
    """

    __slots__ = ("_kept", "_store", "num_blocks", "num_used")

    def __init__(self, store: BlockStore, num_blocks: int) -> None:
        self._store = store
        self._kept: dict[Sequence, Any] = {}
        self.num_blocks = num_blocks
        self.num_used = 0

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self._kept

    def save(self, sequence: Sequence, block_size: int) -> bool:
        """Copies what is computed of the own KV, if the copy fits; whether it did."""
        num_blocks = cdiv(sequence.num_computed, block_size)
        if not 0 < num_blocks <= self.num_blocks - self.num_used:
            return False
        self._kept[sequence] = self._store.read_blocks(sequence.block_ids[:num_blocks])
        self.num_used += num_blocks
        return True

    def restore(self, sequence: Sequence, block_size: int) -> None:
        """Writes a sequence's KV into the first of its blocks, and gives up the copy."""
        num_blocks = cdiv(sequence.num_computed, block_size)
        self._store.write_blocks(sequence.block_ids[:num_blocks], self._kept.pop(sequence))
        self.num_used -= num_blocks
