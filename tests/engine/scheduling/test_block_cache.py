"""The LRU block cache: what it finds, what it keeps, what it gives away first, and that blocks are counted right."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Request
from engine.errors import CapacityError
from engine.kv.lru_block_pool import LruBlockPool
from engine.scheduling.block_cache import BlockCache
from engine.scheduling.sequence import Sequence

BLOCK_SIZE = 4


def sequence_of(tokens: list[int]) -> Sequence:
    request = Request(request_id="a", token_ids=tokens, max_new_tokens=8)
    return Sequence(request=request, owners=(0,), node=None)


def compute(sequence: Sequence, pool: LruBlockPool, cache: BlockCache) -> int:
    """Computes what is known of a sequence; returns how many tokens were found instead."""
    cache.reuse(sequence)
    num_found = sequence.num_computed
    sequence.reserve(pool, sequence.length)
    sequence.num_computed = sequence.length
    cache.remember(sequence, num_found)
    return num_found


def test_full_blocks_of_equal_beginnings_are_found() -> None:
    pool = LruBlockPool(40, BLOCK_SIZE)
    cache = BlockCache(pool)
    first = sequence_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert compute(first, pool, cache) == 0
    same = sequence_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert compute(same, pool, cache) == 8
    assert same.block_ids[:2].tolist() == first.block_ids[:2].tolist()
    assert same.block_ids[2] != first.block_ids[2]
    assert pool.num_used == 4
    # The last token is always computed; a block counts only together with all before it.
    assert compute(sequence_of([1, 2, 3, 4, 5, 6, 7, 8]), pool, cache) == 4
    assert compute(sequence_of([1, 2, 3, 4, 0, 6, 7, 8, 9]), pool, cache) == 4
    assert compute(sequence_of([0, 2, 3, 4, 5, 6, 7, 8, 9]), pool, cache) == 0


def test_blocks_outlive_their_owners_until_memory_is_needed() -> None:
    pool = LruBlockPool(6, BLOCK_SIZE)
    cache = BlockCache(pool)
    old, new = sequence_of([1] * 9), sequence_of([2] * 9)
    for sequence in (old, new):
        compute(sequence, pool, cache)
        sequence.release(pool)
    assert (pool.num_used, pool.num_free, pool.num_idle) == (0, 6, 4)
    pool.free(pool.allocate(3))  # one idle block goes: the last of the older sequence
    assert compute(sequence_of([1] * 9), pool, cache) == 4
    assert compute(sequence_of([2] * 9), pool, cache) == 8
    with pytest.raises(CapacityError, match="2 KV blocks needed, 0 of 6 free"):
        pool.allocate(2)


def test_generated_tokens_are_remembered_and_labels_are_not() -> None:
    pool = LruBlockPool(20, BLOCK_SIZE)
    cache = BlockCache(pool)
    sequence = sequence_of([1, 2, 3])
    compute(sequence, pool, cache)
    for token in (4, 5):
        sequence.set_token(sequence.length, token)
    sequence.reserve(pool, 5)
    sequence.num_computed = 5
    cache.remember(sequence, 3)
    assert compute(sequence_of([1, 2, 3, 4, 9]), pool, cache) == 4
    scored = Request(request_id="s", token_ids=[7, 7, 7], mode="score", labels=((8, 9), (1,)))
    scoring = Sequence(request=scored, owners=(0,), node=None)
    compute(scoring, pool, cache)
    scoring.start_label(0)
    scoring.reserve(pool, 4)
    scoring.num_computed = 4
    cache.remember(scoring, 3)
    assert compute(sequence_of([7, 7, 7, 8, 1]), pool, cache) == 0


@given(st.integers(4, 14), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=80))
def test_every_block_is_owned_idle_or_free(num_blocks: int, actions: list[tuple[int, int]]) -> None:
    pool = LruBlockPool(num_blocks, BLOCK_SIZE)
    names = [bytes([name]) for name in range(6)]
    held: list[np.ndarray] = []
    for action, value in actions:
        if action == 0 and value <= pool.num_free:
            held.append(pool.allocate(value))
        elif action == 1 and held:
            pool.free(held.pop(value % len(held)))
        elif action == 2 and held and len(held[-1]):
            pool.remember(int(held[-1][value % len(held[-1])]), names[value % len(names)])
        elif action == 3:
            found = pool.find(names[value % len(names) :])
            if len(found):
                pool.share(found)
                held.append(found)
        owned = {block for blocks in held for block in blocks.tolist()}
        assert pool.num_used == len(owned)
        assert pool.num_idle <= pool.num_free
    for blocks in held:
        pool.free(blocks)
    assert sorted(pool.allocate(num_blocks).tolist()) == list(range(num_blocks))
    assert len(pool.find(names)) == pool.num_idle == 0
