"""KV blocks of models with sliding-window layers: several block tables per request, and blocks that are freed early.

A table is a column of `Sequence.block_ids`. A prompt being computed has blocks for all its tokens in each table. Blocks
that the next row's window no longer covers are freed at the commit of the step before it, so that no step in flight, in
any process, still reads or writes them. The last blocks of a window's table are reused in turn: a later block of the
answer is the same memory as one that has left the window. Each prefix keeps the blocks that the window of the row after
its end covers.
"""

import numpy as np
import numpy.typing as npt

from engine.kernels import cdiv
from engine.kv.block_pool import BlockPool
from engine.kv.kv_layout import first_block
from engine.request import Request
from engine.scheduling.sequence import Sequence, most_extra_tokens
from engine.scheduling.step import Step

Blocks = npt.NDArray[np.int32]

_GONE = -1
"""Table entry of a block that has left the window and is freed."""

_MOST_FREE_TOKENS = 8
"""Most tokens of an answer in a decode step besides forced ones: one known token, and guesses."""


class WindowedPool(BlockPool):
    """Blocks for the tables of `KVLayout`. Block tables are int32 ``[num_blocks, num_tables]``.

    In a window's table, blocks before `first` are freed, blocks [first, end) are distinct, and block i from `end` on is
    the same memory as block i - (end - first), which has left the window when i is written.

    Args:
        windows: of each table, the positions that a row sees, its own included; 0: all.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: tuple[int, ...]) -> None:
        super().__init__(num_blocks, block_size)
        self._windows = windows
        self.num_tables = len(windows)

    def allocate_table(self, num_blocks: int) -> Blocks:
        """Allocates the table of a prefix; all its blocks are distinct."""
        blocks = self.allocate(num_blocks * self.num_tables)
        return np.stack(np.split(blocks, self.num_tables), axis=1)

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        spans = self._spans(sequence, cdiv(num_tokens, self.block_size))
        return sum(end - old_end for _, old_end, end in spans)

    def extend(self, sequence: Sequence, num_blocks: int) -> None:
        spans = self._spans(sequence, num_blocks)
        new = self.allocate(sum(end - old_end for _, old_end, end in spans))
        table = np.full((num_blocks, self.num_tables), _GONE, dtype=np.int32)
        for column, (first, old_end, end) in enumerate(spans):
            taken, new = np.split(new, [end - old_end])
            held = sequence.block_ids[first:old_end, column] if old_end > first else new[:0]
            table[first:, column] = np.resize(np.concatenate([held, taken]), num_blocks - first)
        sequence.block_ids = table

    def free(self, block_ids: Blocks) -> None:
        """Frees the blocks of a table, or single ones."""
        super().free(np.unique(block_ids[block_ids != _GONE]))

    def written_blocks(self, sequence: Sequence) -> Blocks:
        """The blocks of each table in turn."""
        end = cdiv(sequence.num_computed, self.block_size)
        return np.concatenate(
            [
                sequence.block_ids[first_block(sequence.num_computed, window, self.block_size) : end, column]
                for column, window in enumerate(self._windows)
            ]
        )

    def leave(self, step: Step) -> Blocks:
        """Removes blocks that no later row sees from the tables of the step's prompts; returns them, still in use."""
        left = [np.empty(0, dtype=np.int32)]
        for node in step.prefixes:
            for column, window in enumerate(self._windows):
                gone = node.block_ids[: first_block(node.num_computed, window, self.block_size), column]
                left.append(gone[gone != _GONE])
                self.num_prefix_blocks -= len(left[-1])
                gone[:] = _GONE
        for sequence, _ in step.suffixes:
            for column, window in enumerate(self._windows):
                left.append(self._leave(sequence, column, window))
        return np.concatenate(left)

    def _leave(self, sequence: Sequence, column: int, window: int) -> Blocks:
        table = sequence.block_ids[:, column]
        first, end = _span(table)
        new_first = first_block(sequence.num_computed, window, self.block_size)
        new_first = min(new_first, end - self._num_round(sequence.request, window))
        if not window or new_first <= first:
            return table[:0]
        left = table[first:new_first].copy()
        table[new_first:] = np.resize(table[new_first:end], len(table) - new_first)
        table[:new_first] = _GONE
        return left

    def _spans(self, sequence: Sequence, num_blocks: int) -> list[tuple[int, int, int]]:
        """For each table: its first block, the end of its distinct blocks, and their end with `num_blocks` blocks."""
        spans = []
        for column, window in enumerate(self._windows):
            if len(sequence.block_ids):
                first, old_end = _span(sequence.block_ids[:, column])
                known = old_end
            else:
                first = old_end = first_block(sequence.num_computed, window, self.block_size)
                num_guesses = _MOST_FREE_TOKENS if sequence.num_computed >= sequence.num_suffix else 0  # swapped in
                known = cdiv(sequence.length + num_guesses, self.block_size)
            most = num_blocks if not window else max(known, first + self._num_round(sequence.request, window))
            spans.append((first, old_end, max(old_end, min(num_blocks, most))))
        return spans

    def _num_round(self, request: Request, window: int) -> int:
        """Distinct blocks that suffice for a window while an answer is decoded: the next block to write is free."""
        most = most_extra_tokens(request) + 1
        if request.mode == "generate":
            thinking = request.thinking
            closing, budget = ((), 0) if thinking is None else (thinking.closing, thinking.max_tokens)
            num_forced = len(closing) + (0 if request.grammar is None else request.max_new_tokens - budget)
            most = min(most, _MOST_FREE_TOKENS + num_forced)
        return cdiv(window - 1 + most, self.block_size) + 1


def _span(table: Blocks) -> tuple[int, int]:
    """The first block that is not freed, and the end of the distinct ones."""
    first = int(np.argmax(table != _GONE))
    return first, first + len(np.unique(table[first:]))
