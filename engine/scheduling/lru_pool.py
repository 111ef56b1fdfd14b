"""Implicit prefix sharing: full KV blocks are found again by their tokens, as in vLLM's prefix cache.

The baseline of BatchLLM's comparison (section 6.3.1). It knows no later requests, so blocks keep their contents until
their memory is needed, and the least recently used one is evicted first.
"""

from collections import OrderedDict
from hashlib import blake2b
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from engine.kv.block_pool import BlockPool
from engine.scheduling.sequence import Sequence


class LruPool(BlockPool):
    """As `BlockPool`; a block may have several owners, and sequences that have no prefix node find its contents again.

    A block's key is a digest of its tokens and of the key before it, so it stands for all tokens up to the block's end.
    Blocks are remembered after the step that fills them: requests that start in one step do not find each other's. A
    remembered block without owners is idle: it counts as free and can be found, until `allocate` has no other block
    left and takes the least recently used idle one.

    Invariants: idle blocks are not in the extents; num_free counts both.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._num_owners = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._keys: dict[Sequence, list[bytes]] = {}

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

    def num_found_in_use(self, sequence: Sequence) -> int:
        return sum(self._num_owners[block] > 0 for block in self._find(sequence))

    def reuse(self, sequence: Sequence) -> None:
        found, first = self._find(sequence), sequence.num_computed // self.block_size
        if not found:
            return
        for block in found:
            if self._num_owners[block] == 0:
                del self._idle[block]
                self.num_free -= 1
            self._num_owners[block] += 1
        last = first + len(found)
        self.free(sequence.block_ids[first:last])
        shared = np.array(found, dtype=np.int32)
        sequence.block_ids = np.concatenate([sequence.block_ids[:first], shared, sequence.block_ids[last:]])
        sequence.num_computed = last * self.block_size

    def remember(self, sequence: Sequence, num_earlier: int) -> None:
        """Where a block's key has a block already, that block is kept."""
        num_known = min(sequence.num_computed, _num_lasting_tokens(sequence))
        first, last = num_earlier // self.block_size, num_known // self.block_size
        if first < last:
            keys = self._keys_of(sequence, last)
            for block, key in zip(sequence.block_ids[first:last].tolist(), keys[first:], strict=True):
                if key not in self._block_of and block not in self._key_of:
                    self._block_of[key] = block
                    self._key_of[block] = key

    def forget(self, sequence: Sequence) -> None:
        self._keys.pop(sequence, None)

    def _find(self, sequence: Sequence) -> list[int]:
        """Remembered blocks from num_computed on. The last known token is always computed, for its logits."""
        last = (_num_lasting_tokens(sequence) - 1) // self.block_size
        keys = self._keys_of(sequence, last)[sequence.num_computed // self.block_size :]
        return [self._block_of[key] for key in takewhile(self._block_of.__contains__, keys)]

    def _keys_of(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        keys = self._keys.setdefault(sequence, [])
        for index in range(len(keys), num_blocks):
            tokens = sequence.own_token_ids[index * self.block_size : (index + 1) * self.block_size]
            keys.append(blake2b(tokens.tobytes(), digest_size=16, key=keys[-1] if keys else b"").digest())
        return keys[:num_blocks]


def _num_lasting_tokens(sequence: Sequence) -> int:
    """Known own tokens that are final: a label's tokens are replaced by those of the next label."""
    return sequence.length if sequence.request.mode == "generate" else sequence.num_suffix
