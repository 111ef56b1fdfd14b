"""A model that is a hash: a token's "KV" is one number, made of the token and of all KV that it attends to.

So one token that was not known in time, or one slot that is stale, missing or overwritten, shows in every answer that
depends on it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np
import numpy.typing as npt
import torch

from engine.scheduling.token_batch import TokenBatch
from tests.engine.engine_configs import BLOCK_SIZE

UNWRITTEN = 10**9


class HashMemory:
    """KV memory of the hash model; one block more for padding."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = np.full((num_blocks + 1, BLOCK_SIZE), UNWRITTEN)

    def compute(self, batch: TokenBatch, input_ids: Sequence[int] | npt.NDArray[np.int64]) -> torch.Tensor:
        """Writes a step's KV; returns that of its output rows, which is all that the model knows there."""
        attention = batch.attention
        slots = self.blocks.reshape(-1)
        group_of = np.repeat(np.arange(len(attention.prefix_lens)), np.diff(attention.group_starts))
        for sequence, group in enumerate(group_of):
            prefix_ids = attention.prefix_block_ids[attention.prefix_block_starts[group] :]
            own_ids = attention.suffix_block_table[attention.suffix_block_starts[sequence] :]
            seen = slot_ids(prefix_ids, attention.prefix_lens[group])
            own = slot_ids(own_ids, attention.suffix_lens[sequence])
            rows = range(attention.cu_seqlens_q[sequence], attention.cu_seqlens_q[sequence + 1])
            for row, place in zip(rows, range(len(own) - len(rows), len(own)), strict=True):
                earlier = int(slots[seen].sum() + slots[own[:place]].sum())
                slots[attention.slot_mapping[row]] = mix(earlier, int(input_ids[row]))
        return torch.from_numpy(slots[attention.slot_mapping[batch.output_rows]].copy())


def slot_ids(block_ids: npt.NDArray[np.int32], num_tokens: int) -> npt.NDArray[np.int64]:
    places = np.arange(num_tokens)
    return block_ids[places // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + places % BLOCK_SIZE


def mix(earlier: int, token: int) -> int:
    return (earlier * 31 + token * 7919 + 5) % 1_000_003


def answer_without_end(prompt: Sequence[int], next_token: Callable[[int], int]) -> Iterator[int]:
    """What the hash model says, straight away: token by token, for as long as it is asked."""
    tokens, total = list(prompt), 0
    for place in count():
        state = mix(total, tokens[place])
        total += state
        if place >= len(prompt) - 1:
            tokens.append(next_token(state))
            yield tokens[-1]
