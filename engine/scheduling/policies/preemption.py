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
        windows: of each block table, where there are several (`KVLayout`).
    """

    __slots__ = ("_kept", "_store", "_windows", "num_blocks", "num_used")

    def __init__(self, store: BlockStore, num_blocks: int, windows: tuple[int, ...] = ()) -> None:
        self._store = store
        self._windows = windows
        self._kept: dict[Sequence, Any] = {}
        self.num_blocks = num_blocks
        self.num_used = 0

    def holds(self, sequence: Sequence) -> bool:
        return sequence in self._kept

    def save(self, sequence: Sequence, block_size: int) -> bool:
        """Copies what is computed of the own KV, if the copy fits; whether it did."""
        block_ids = self._written_blocks(sequence, block_size)
        if not 0 < len(block_ids) <= self.num_blocks - self.num_used:
            return False
        self._kept[sequence] = self._store.read_blocks(block_ids)
        self.num_used += len(block_ids)
        return True

    def restore(self, sequence: Sequence, block_size: int) -> None:
        """Writes a sequence's KV into its blocks, and gives up the copy."""
        block_ids = self._written_blocks(sequence, block_size)
        self._store.write_blocks(block_ids, self._kept.pop(sequence))
        self.num_used -= len(block_ids)

    def _written_blocks(self, sequence: Sequence, block_size: int) -> npt.NDArray[np.int32]:
        if not self._windows:
            return sequence.block_ids[: cdiv(sequence.num_computed, block_size)]
        from engine.scheduling.windowed_pool import written_blocks

        return written_blocks(sequence, self._windows, block_size)
