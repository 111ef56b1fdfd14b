"""Chosen orders: no more to compute than as written or in any one order, less where rows share different parts."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.layouts import choose
from tasks.layouts.choose import find_orders, list_ways, order_rows, spread_orders
from tasks.layouts.estimate import PartTexts, RowOrders, count_bytes

NUM_ROWS = 6
HASHES = np.random.default_rng(0).integers(1 << 63, size=14, dtype=np.uint64)
TEXTS = st.lists(st.integers(0, 3), min_size=NUM_ROWS, max_size=NUM_ROWS)


@st.composite
def part_texts(draw: st.DrawFn) -> PartTexts:
    """Six rows of a workload with two or three parts, of few different texts, under labels that others may have too."""
    labels = draw(st.permutations(range(3)))[: draw(st.integers(2, 3))]
    numbers = np.array([draw(TEXTS) for _ in labels]).T + 4 * np.array(labels)
    head = int(HASHES[draw(st.integers(12, 13))])
    return PartTexts(head=head, hashes=HASHES[numbers], num_bytes=7 * numbers % 11 + 1)


def count_naively(workloads: list[PartTexts], orders: list[RowOrders]) -> int:
    """Bytes of every different beginning, one row after the other."""
    seen: dict[tuple[int, ...], int] = {}
    for texts, rows in zip(workloads, orders, strict=True):
        for row, order in enumerate(rows.tolist()):
            for end in range(1, len(order) + 1):
                beginning = (texts.head, *(int(texts.hashes[row][number]) for number in order[:end]))
                seen[beginning] = int(texts.num_bytes[row][order[end - 1]])
    return sum(seen.values())


def list_choices(workloads: list[PartTexts]) -> list[list[tuple[int, ...]]]:
    return [list(permutations(range(texts.hashes.shape[1]))) for texts in workloads]


@given(st.lists(part_texts(), min_size=1, max_size=3), st.booleans())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_one_order_of_all_rows_computes_less(
    monkeypatch: pytest.MonkeyPatch, workloads: list[PartTexts], is_exhaustive: bool
) -> None:
    choices = list_choices(workloads)
    with monkeypatch.context() as patched:
        if not is_exhaustive:
            patched.setattr(choose, "MOST_COMPARED", 0)
        found = find_orders(workloads, choices)
    naive = {orders: count_naively(workloads, spread_orders(workloads, orders)) for orders in product(*choices)}
    assert all(count_bytes(workloads, list(orders)) == num_bytes for orders, num_bytes in naive.items())
    assert naive[tuple(found)] <= naive[tuple(choice[0] for choice in choices)]
    if is_exhaustive or len(workloads) == 1:
        assert naive[tuple(found)] == min(naive.values())


@given(st.lists(part_texts(), min_size=1, max_size=2), st.data())
@settings(max_examples=40)
def test_an_order_for_each_row_is_offered_where_it_computes_less(
    workloads: list[PartTexts], data: st.DataObject
) -> None:
    choices = list_choices(workloads)
    is_uniform = [data.draw(st.booleans()) for _ in workloads]
    ways = list_ways(workloads, choices, is_uniform)
    one, best = ways[0], ways[-1]
    assert count_bytes(workloads, best) == count_naively(workloads, best) <= count_naively(workloads, one)
    for orders in product(*choices):
        assert count_naively(workloads, best) <= count_naively(workloads, spread_orders(workloads, orders))
    for rows, choice, has_one in zip(best, choices, is_uniform, strict=True):
        different = {tuple(order) for order in rows.tolist()}
        assert different <= set(choice)
        assert len(different) == 1 or not has_one


def test_rows_that_share_different_parts_put_different_parts_first() -> None:
    # Of rows 0 to 2 the first part is the same, of rows 3 to 5 the second; the third one is everybody's.
    texts = PartTexts(
        head=1,
        hashes=np.array(
            [[10, 21, 30], [10, 22, 30], [10, 23, 30], [14, 20, 30], [15, 20, 30], [16, 20, 30]], np.uint64
        ),
        num_bytes=np.tile([100, 100, 8], (6, 1)),
    )
    choices = list_choices([texts])
    _, (found,) = list_ways([texts], choices, [False])
    assert found.tolist() == [[2, 0, 1]] * 3 + [[2, 1, 0]] * 3
    assert count_bytes([texts], [found]) == 8 + 2 * (100 + 3 * 100)
    assert min(count_bytes([texts], [order]) for order in choices[0]) == 8 + 4 * 100 + 6 * 100
    assert len(list_ways([texts], choices, [True])) == 1


def test_a_part_that_others_decide_comes_with_them() -> None:
    """Every document has one customer: the customer comes first, though the document alone saves each row more."""
    documents, rows = np.repeat(np.arange(40), 3), 120
    customers, questions = documents // 10, np.arange(rows) % 5
    texts = PartTexts(
        head=1,
        hashes=np.stack([documents + 1000, questions + 2000, customers + 3000], axis=1).astype(np.uint64),
        num_bytes=np.tile([400, 30, 60], (rows, 1)),
    )
    (found,) = order_rows([texts], spread_orders([texts], [(0, 1, 2)]), [False])
    assert np.unique(found, axis=0).tolist() == [[2, 0, 1]]
    assert count_bytes([texts], [found]) == 4 * 60 + 40 * 400 + rows * 30


@given(part_texts(), st.permutations(range(NUM_ROWS)))
@settings(max_examples=30)
def test_the_place_of_a_row_in_its_table_decides_nothing(texts: PartTexts, shuffled: list[int]) -> None:
    other = PartTexts(head=texts.head, hashes=texts.hashes[shuffled], num_bytes=texts.num_bytes[shuffled])
    (found,) = order_rows([texts], spread_orders([texts], [tuple(range(texts.hashes.shape[1]))]), [False])
    (again,) = order_rows([other], spread_orders([other], [tuple(range(texts.hashes.shape[1]))]), [False])
    assert found[shuffled].tolist() == again.tolist()
