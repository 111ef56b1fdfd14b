"""A model that is a hash: a token's "KV" is one number, made of the token and of all KV that it attends to.

So one token that was not known in time, or one slot that is stale, missing or overwritten, shows in every answer that
depends on it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st

from engine import EngineConfig
from engine.execution.output import TokenSampler
from engine.kv.block_pool import BlockPool
from engine.kv.kv_layout import find_layout, kept_windows
from engine.scheduling.prompt_lookup import PromptLookup
from engine.scheduling.token_batch import TokenBatch
from tests.engine.engine_configs import BLOCK_SIZE

UNWRITTEN = 10**9


class HashMemory:
    """KV memory of the hash model; one block more for padding.

    Args:
        windows: of the model's layers, the positions that a row sees; 0: all. Each layer adds up what it sees.
    """

    def __init__(self, num_blocks: int, windows: Sequence[int] = (0,)) -> None:
        self.blocks = np.full((num_blocks + 1, BLOCK_SIZE), UNWRITTEN)
        self._windows = windows

    def compute(self, batch: TokenBatch, input_ids: Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        """Writes a step's KV; returns that of its output rows, which is all that the model knows there."""
        attention = batch.attention
        tables = [attention, *batch.more_attention]
        assert len(tables) in (1, len(self._windows)), "a table for all layers, or one for each"
        slots = self.blocks.reshape(-1)
        group_of = np.repeat(np.arange(len(attention.prefix_lens)), np.diff(attention.group_starts))
        for sequence, group in enumerate(group_of):
            seen = [
                np.concatenate(
                    [
                        slot_ids(table.prefix_block_ids[table.prefix_block_starts[group] :], table.prefix_lens[group]),
                        slot_ids(
                            table.suffix_block_table[table.suffix_block_starts[sequence] :],
                            table.suffix_lens[sequence],
                        ),
                    ]
                )
                for table in tables
            ]
            rows = range(attention.cu_seqlens_q[sequence], attention.cu_seqlens_q[sequence + 1])
            for row, place in zip(rows, range(len(seen[0]) - len(rows), len(seen[0])), strict=True):
                earlier = sum(
                    int(slots[seen[layer % len(tables)][first_seen(place, window) : place]].sum())
                    for layer, window in enumerate(self._windows)
                )
                for table in tables:
                    slots[table.slot_mapping[row]] = mix(earlier, int(input_ids[row]))
        return torch.from_numpy(slots[attention.slot_mapping[batch.output_rows]].copy())


def first_seen(place: int, window: int) -> int:
    """The first position that a row at `place` sees."""
    return max(0, place - window + 1) if window else 0


def poison_freed_blocks(pool: BlockPool, *memories: HashMemory) -> None:
    """Has whatever is freed from now on hold what no answer may depend on."""

    class Poisoning(type(pool)):  # type: ignore[misc]
        __slots__ = ()

        def _give_back(self, start: int, length: int) -> None:
            super()._give_back(start, length)
            for memory in memories:
                memory.blocks[start : start + length] = UNWRITTEN

    pool.__class__ = Poisoning


class EagerLookup(PromptLookup):
    """Guesses whatever may be right, however unlikely: weights that take for ever to read make each row worth it."""

    def __init__(self, sampler: TokenSampler) -> None:
        super().__init__(num_weight_rows=10**9, num_weight_kv_tokens=1, count_allowed=sampler.count_allowed)


def kept_tables(windows: tuple[int, ...], config: EngineConfig) -> tuple[int, ...]:
    """The windows of the block tables of a model of such layers under these policies, as an engine chooses them."""
    return find_layout(kept_windows(windows, config) or (0,) * len(windows)).windows


WINDOWS = st.sampled_from([(0,), (0,), (1,), (3,), (5,), (9,), (0, 2), (0, 6), (0, 7), (0, 5, 5), (2, 11)])
"""Windows of the layers of a model, in the order of `find_layout`; shorter and longer than blocks and prompts."""


def slot_ids(block_ids: npt.NDArray[np.int32], num_tokens: int) -> npt.NDArray[np.int64]:
    places = np.arange(num_tokens)
    return block_ids[places // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + places % BLOCK_SIZE


def mix(earlier: int, token: int) -> int:
    return (earlier * 31 + token * 7919 + 5) % 1_000_003


def answer_without_end(
    prompt: Sequence[int], next_token: Callable[[int], int], windows: Sequence[int] = (0,)
) -> Iterator[int]:
    """What the hash model says, straight away: token by token, for as long as it is asked."""
    tokens, states = list(prompt), list[int]()
    for place in count():
        state = mix(sum(sum(states[first_seen(place, window) :]) for window in windows), tokens[place])
        states.append(state)
        if place >= len(prompt) - 1:
            tokens.append(next_token(state))
            yield tokens[-1]
