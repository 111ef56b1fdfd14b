"""Which KV blocks are free. Contiguous runs are preferred, so that a prefix's KV is read without a gather."""

from bisect import bisect_left
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import CapacityError
from engine.kernels import cdiv

NO_BLOCKS = np.empty(0, dtype=np.int32)


class BlockPool:
    """Free list of `num_blocks` KV blocks of `block_size` tokens, kept as sorted extents (start, length).

    Invariants: extents are disjoint, never adjacent, and their lengths add up to `num_free`.
    `allocate` could give `num_free` blocks now; `PrefixNode` counts the used blocks of shared prefixes."""

    num_tables = 1
    """Block tables of a request; several where layers have sliding windows (`WindowedPool`)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_free = num_blocks
        self.num_prefix_blocks = 0
        self.num_touched = 0  # no block from this one on has ever been allocated
        self._starts = [0] if num_blocks else []
        self._lengths = [num_blocks] if num_blocks else []

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_idle(self) -> int:
        """Free blocks whose contents can still be reused (`LruPool`); none here."""
        return 0

    def allocate(self, count: int) -> npt.NDArray[np.int32]:
        """Takes blocks from the tightest extent that holds them all, else from several: int32 ``[count]``, ascending
        within each extent. Raises `CapacityError` if fewer are free; nothing is taken then."""
        if count > self.num_free:
            raise CapacityError(f"{count} KV blocks needed, {self.num_free} of {self.num_blocks} free")
        if count == 0:
            return NO_BLOCKS
        fitting = [length for length in self._lengths if length >= count]
        if fitting:
            return self._take(self._lengths.index(min(fitting)), count)
        parts = []
        while count:
            widest = max(range(len(self._lengths)), key=self._lengths.__getitem__)
            parts.append(self._take(widest, min(count, self._lengths[widest])))
            count -= len(parts[-1])
        return np.concatenate(parts)

    def allocate_table(self, num_blocks: int) -> npt.NDArray[np.int32]:
        """Allocates a whole block table, int32 ``[num_blocks]``; raises as `allocate` does."""
        return self.allocate(num_blocks)

    def num_missing(self, sequence: Any, num_tokens: int) -> int:
        """Blocks that a table of `num_tokens` own tokens lacks; negative where the sequence has more."""
        return cdiv(num_tokens, self.block_size) - len(sequence.block_ids)

    def extend(self, sequence: Any, num_blocks: int) -> None:
        """Lengthens the sequence's table to num_blocks; raises as `allocate` does."""
        missing = self.allocate(num_blocks - len(sequence.block_ids))
        sequence.block_ids = np.concatenate([sequence.block_ids, missing])

    def written_blocks(self, sequence: Any) -> npt.NDArray[np.int32]:
        """The blocks with the part of the sequence's computed KV that later rows see."""
        return sequence.block_ids[: cdiv(sequence.num_computed, self.block_size)]  # type: ignore[no-any-return]

    def leave(self, step: Any) -> npt.NDArray[np.int32]:
        """Takes blocks that no row reads after a step from block tables (`WindowedPool`), to be freed at its commit."""
        return NO_BLOCKS

    def num_found_in_use(self, sequence: Any) -> int:
        """Blocks that the sequence would find (`LruPool`) and that other sequences hold: sharing takes no memory."""
        return 0

    def reuse(self, sequence: Any) -> None:
        """Puts found blocks (`LruPool`) into a sequence's table, in place of ones that are not written yet."""

    def remember(self, sequence: Any, num_earlier: int) -> None:
        """Blocks filled since the sequence had `num_earlier` computed tokens can be found from now on (`LruPool`)."""

    def forget(self, sequence: Any) -> None:
        """Drops the keys of a finished sequence; its blocks can still be found (`LruPool`)."""

    def free(self, block_ids: npt.NDArray[np.int32]) -> None:
        """Frees blocks. Freeing a block that is free already breaks an invariant and asserts."""
        if len(block_ids) == 0:
            return
        ordered = np.sort(block_ids)
        breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
        for extent in np.split(ordered, breaks):
            self._give_back(int(extent[0]), len(extent))
        self.num_free += len(block_ids)

    def _take(self, index: int, count: int) -> npt.NDArray[np.int32]:
        start = self._starts[index]
        if self._lengths[index] == count:
            del self._starts[index], self._lengths[index]
        else:
            self._starts[index] += count
            self._lengths[index] -= count
        self.num_free -= count
        self.num_touched = max(self.num_touched, start + count)
        return np.arange(start, start + count, dtype=np.int32)

    def _give_back(self, start: int, length: int) -> None:
        index = bisect_left(self._starts, start)
        left_end = self._starts[index - 1] + self._lengths[index - 1] if index else -1
        right_start = self._starts[index] if index < len(self._starts) else self.num_blocks + 1
        assert 0 <= start <= self.num_blocks - length, "a freed block is not of this pool"
        is_used = left_end <= start and start + length <= right_start
        assert is_used, f"a KV block in [{start}, {start + length}) is freed twice"
        if start + length == right_start:
            del self._starts[index]
            length += self._lengths.pop(index)
        if left_end == start:
            self._lengths[index - 1] += length
        else:
            self._starts.insert(index, start)
            self._lengths.insert(index, length)
