"""The block pool: what it gives, what it refuses, and that nothing leaks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import CapacityError
from engine.kv.block_pool import BlockPool


def test_contiguous_blocks_come_from_the_tightest_gap() -> None:
    pool = BlockPool(20, 1)
    first, second, third = pool.allocate(4), pool.allocate(3), pool.allocate(5)
    pool.free(first)
    pool.free(third[:2])
    assert pool.allocate(2).tolist() == third[:2].tolist()
    assert pool.allocate(4).tolist() == first.tolist()
    assert second.tolist() == [4, 5, 6]


def test_blocks_come_from_several_gaps_when_none_is_wide_enough() -> None:
    pool = BlockPool(6, 1)
    taken = pool.allocate(6)
    pool.free(taken[::2])
    assert sorted(pool.allocate(3).tolist()) == [0, 2, 4]


def test_blocks_beyond_the_touched_ones_have_never_been_given() -> None:
    pool = BlockPool(8, 1)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.free(first)
    pool.free(second)
    pool.allocate(1)
    assert (pool.num_touched, pool.num_used) == (5, 1)


def test_a_refusal_takes_nothing() -> None:
    pool = BlockPool(3, 1)
    pool.allocate(2)
    with pytest.raises(CapacityError, match="2 KV blocks needed, 1 of 3 free"):
        pool.allocate(2)
    assert pool.num_free == 1


def test_freeing_twice_is_an_error() -> None:
    pool = BlockPool(8, 1)
    taken = pool.allocate(4)
    pool.free(taken[1:2])
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(taken[:2])


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_every_block_has_at_most_one_owner(num_blocks: int, actions: list[tuple[bool, int]]) -> None:
    pool = BlockPool(num_blocks, 1)
    held: list[np.ndarray] = []
    for is_allocation, size in actions:
        if is_allocation and size <= pool.num_free:
            held.append(pool.allocate(size))
            assert len(held[-1]) == size
        elif not is_allocation and held:
            pool.free(held.pop(size % len(held)))
        owned = [block for blocks in held for block in blocks.tolist()]
        assert len(owned) == len(set(owned)) == pool.num_used
        assert all(0 <= block < num_blocks for block in owned)
    for blocks in held:
        pool.free(blocks)
    assert pool.allocate(num_blocks).tolist() == list(range(num_blocks))
