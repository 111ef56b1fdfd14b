"""The LRU block pool: what it finds, what it keeps, what it gives away first, and that blocks are counted right."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import Request
from engine.errors import CapacityError
from engine.scheduling.lru_pool import LruPool
from engine.scheduling.sequence import Sequence

BLOCK_SIZE = 4


def sequence_of(tokens: list[int]) -> Sequence:
    request = Request(request_id="a", token_ids=tokens, max_new_tokens=8)
    return Sequence(request=request, owners=(0,), node=None)


def compute(sequence: Sequence, pool: LruPool) -> int:
    """Computes what is known of a sequence; returns how many tokens were found instead."""
    pool.reuse(sequence)
    num_found = sequence.num_computed
    sequence.reserve(pool, sequence.length)
    sequence.num_computed = sequence.length
    pool.remember(sequence, num_found)
    return num_found


def test_full_blocks_of_equal_beginnings_are_found() -> None:
    pool = LruPool(40, BLOCK_SIZE)
    first = sequence_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert compute(first, pool) == 0
    same = sequence_of([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert compute(same, pool) == 8
    assert same.block_ids[:2].tolist() == first.block_ids[:2].tolist()
    assert same.block_ids[2] != first.block_ids[2]
    assert pool.num_used == 4
    # The last token is always computed; a block counts only together with all before it.
    assert compute(sequence_of([1, 2, 3, 4, 5, 6, 7, 8]), pool) == 4
    assert compute(sequence_of([1, 2, 3, 4, 0, 6, 7, 8, 9]), pool) == 4
    assert compute(sequence_of([0, 2, 3, 4, 5, 6, 7, 8, 9]), pool) == 0


def test_blocks_outlive_their_owners_until_memory_is_needed() -> None:
    pool = LruPool(6, BLOCK_SIZE)
    old, new = sequence_of([1] * 9), sequence_of([2] * 9)
    for sequence in (old, new):
        compute(sequence, pool)
        sequence.release(pool)
    assert (pool.num_used, pool.num_free, pool.num_idle) == (0, 6, 4)
    pool.free(pool.allocate(3))  # one idle block goes: the last of the older sequence
    assert compute(sequence_of([1] * 9), pool) == 4
    assert compute(sequence_of([2] * 9), pool) == 8
    with pytest.raises(CapacityError, match="2 KV blocks needed, 0 of 6 free"):
        pool.allocate(2)


def test_generated_tokens_are_remembered_and_labels_are_not() -> None:
    pool = LruPool(20, BLOCK_SIZE)
    sequence = sequence_of([1, 2, 3])
    compute(sequence, pool)
    for token in (4, 5):
        sequence.set_token(sequence.length, token)
    sequence.reserve(pool, 5)
    sequence.num_computed = 5
    pool.remember(sequence, 3)
    assert compute(sequence_of([1, 2, 3, 4, 9]), pool) == 4
    scored = Request(request_id="s", token_ids=[7, 7, 7], mode="score", labels=((8, 9), (1,)))
    scoring = Sequence(request=scored, owners=(0,), node=None)
    compute(scoring, pool)
    scoring.start_label(0)
    scoring.reserve(pool, 4)
    scoring.num_computed = 4
    pool.remember(scoring, 3)
    assert compute(sequence_of([7, 7, 7, 8, 1]), pool) == 0


@given(st.integers(4, 14), st.lists(st.tuples(st.booleans(), st.integers(0, 20)), max_size=80))
def test_every_block_is_owned_idle_or_free(num_blocks: int, actions: list[tuple[bool, int]]) -> None:
    pool = LruPool(num_blocks, BLOCK_SIZE)
    held: list[Sequence] = []
    for starts, value in actions:
        if starts:
            sequence = sequence_of([value % 3] * (1 + value))
            if pool.num_missing(sequence, sequence.length) - pool.num_found_in_use(sequence) <= pool.num_free:
                compute(sequence, pool)
                held.append(sequence)
        elif held:
            sequence = held.pop(value % len(held))
            sequence.release(pool)
            pool.forget(sequence)
        owned = {block for sequence in held for block in sequence.block_ids.tolist()}
        assert pool.num_used == len(owned)
        assert pool.num_idle <= pool.num_free
    for sequence in held:
        sequence.release(pool)
    assert sorted(pool.allocate(num_blocks).tolist()) == list(range(num_blocks))
    assert pool.num_idle == 0
    assert all(pool.num_found_in_use(sequence_of([token] * 99)) == 0 for token in range(3))
