"""A block pool that finds full blocks again by their contents, and evicts the least recently used ones."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from engine.kv.block_pool import BlockPool


class LruBlockPool(BlockPool):
    """As `BlockPool`; a block may have several owners, and keeps its contents until its memory is needed.

    A remembered block without owners is idle: it counts as free and can be found, until `allocate` has no other block
    left and takes the least recently used idle one.

    Invariants: idle blocks are not in the extents; num_free counts both.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._num_owners = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def allocate(self, count: int) -> npt.NDArray[np.int32]:
        while self.num_free - self.num_idle < count <= self.num_free:
            block, _ = self._idle.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            self._give_back(block, 1)
        block_ids = super().allocate(count)
        for block in block_ids.tolist():
            self._num_owners[block] = 1
        return block_ids

    def free(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Removes one owner from each block. Of the blocks that become idle, the last ones are evicted first."""
        unowned = []
        for block in reversed(block_ids.tolist()):
            assert self._num_owners[block] > 0, f"KV block {block} is freed twice"
            self._num_owners[block] -= 1
            if self._num_owners[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                    self.num_free += 1
                else:
                    unowned.append(block)
        super().free(np.array(unowned, dtype=np.int32))

    def find(self, keys: Sequence[bytes]) -> npt.NDArray[np.int32]:
        """The blocks of the leading keys, up to the first key that is not found; their owners stay as they are."""
        return np.array([self._block_of[key] for key in takewhile(self._block_of.__contains__, keys)], dtype=np.int32)

    def count_idle(self, block_ids: npt.NDArray[np.int32]) -> int:
        return sum(self._num_owners[block] == 0 for block in block_ids.tolist())

    def share(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Adds an owner to each block that was found."""
        for block in block_ids.tolist():
            if self._num_owners[block] == 0:
                del self._idle[block]
                self.num_free -= 1
            self._num_owners[block] += 1

    def remember(self, block_id: int, key: bytes) -> None:
        """Records the key of a full block that has an owner. Where the key has a block already, that block is kept."""
        if key not in self._block_of and block_id not in self._key_of:
            self._block_of[key] = block_id
            self._key_of[block_id] = key
