"""Implicit prefix sharing: full KV blocks are found again by their tokens, as in vLLM's prefix cache.

The baseline of BatchLLM's comparison (section 6.3.1). It knows no later requests, so blocks stay in the cache until
their memory is needed, and the least recently used one is evicted first.
"""

from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from engine.kv.lru_block_pool import LruBlockPool
from engine.scheduling.sequence import Sequence


class BlockCache:
    """Finds and remembers the blocks of sequences that have no prefix node.

    A block's key is a digest of its tokens and of the key before it, so it stands for all tokens up to the block's end.
    Blocks are remembered after the step that fills them: requests that start in one step do not find each other's.
    """

    def __init__(self, pool: LruBlockPool) -> None:
        self._pool = pool
        self._block_size = pool.block_size
        self._keys: dict[Sequence, list[bytes]] = {}

    def num_found_in_use(self, sequence: Sequence) -> int:
        """Blocks that the sequence would find and that other sequences hold: sharing them takes no memory."""
        found = self._find(sequence)
        return len(found) - self._pool.count_idle(found)

    def reuse(self, sequence: Sequence) -> None:
        """Puts cached blocks into a sequence's block table, in place of allocated blocks that are not written yet."""
        found, first = self._find(sequence), sequence.num_computed // self._block_size
        if len(found) == 0:
            return
        last = first + len(found)
        self._pool.share(found)
        self._pool.free(sequence.block_ids[first:last])
        sequence.block_ids = np.concatenate([sequence.block_ids[:first], found, sequence.block_ids[last:]])
        sequence.num_computed = last * self._block_size

    def remember(self, sequence: Sequence, num_earlier: int) -> None:
        """Remembers blocks that have become full since the sequence had `num_earlier` computed tokens."""
        num_known = min(sequence.num_computed, _num_lasting_tokens(sequence))
        first, last = num_earlier // self._block_size, num_known // self._block_size
        if first < last:
            keys = self._keys_of(sequence, last)
            for index in range(first, last):
                self._pool.remember(int(sequence.block_ids[index]), keys[index])

    def forget(self, sequence: Sequence) -> None:
        """Drops the keys of a finished sequence; its blocks stay in the cache."""
        self._keys.pop(sequence, None)

    def _find(self, sequence: Sequence) -> npt.NDArray[np.int32]:
        """Cached blocks from num_computed on. The last known token is always computed, for its logits."""
        last = (_num_lasting_tokens(sequence) - 1) // self._block_size
        return self._pool.find(self._keys_of(sequence, last)[sequence.num_computed // self._block_size :])

    def _keys_of(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        keys = self._keys.setdefault(sequence, [])
        for index in range(len(keys), num_blocks):
            tokens = sequence.own_token_ids[index * self._block_size : (index + 1) * self._block_size]
            keys.append(blake2b(tokens.tobytes(), digest_size=16, key=keys[-1] if keys else b"").digest())
        return keys[:num_blocks]


def _num_lasting_tokens(sequence: Sequence) -> int:
    """Known own tokens that are final: a label's tokens are replaced by those of the next label."""
    return sequence.length if sequence.request.mode == "generate" else sequence.num_suffix
