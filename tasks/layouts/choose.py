"""Chooses orders of parts in which prompts share most: one order for all rows of a workload, or one for each row.

Rows and parts are chosen together, as by the GGR algorithm of "Optimizing LLM Queries in Relational Data Analytics
Workloads" (section 4) and by SOLO: rows that share a part's text put it first, then the same is done among them with
the remaining parts. If a row could join several such groups, it joins the one that saves its rows most text.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import product
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt

from tasks.layouts.estimate import Hashes, Ints, PartTexts, RowOrders, count_bytes, mix
from tasks.layouts.parts import Order

MOST_COMPARED = 5_000_000
"""Up to this product of rows and combinations of orders, all combinations are compared."""

WORTH_SPLITTING = 0.05
"""Share that an order for each row must save over one for all: answers may depend on the order."""

MOST_ROUNDS = 8
"""Most rounds in which rows get the part for one place; rows that still wait then take their best part."""

Bools = npt.NDArray[np.bool_]


def list_ways(
    workloads: Sequence[PartTexts], choices: Sequence[Sequence[Order]], is_uniform: Sequence[bool]
) -> list[list[RowOrders]]:
    """Orders of all rows to try: the best with one order for each workload, and the best with an order for each row, if
    it saves `WORTH_SPLITTING` more.

    Args:
        choices: of each workload, the orders that all its rows may have; the first one is the present order.
        is_uniform: workloads whose rows must all have the same order.
    """
    one = spread_orders(workloads, find_orders(workloads, choices))
    if all(is_uniform):
        return [one]
    each = order_rows(workloads, one, is_uniform)
    is_worth = count_bytes(workloads, each) < (1 - WORTH_SPLITTING) * count_bytes(workloads, one)
    return [one, each] if is_worth else [one]


def find_orders(workloads: Sequence[PartTexts], choices: Sequence[Sequence[Order]]) -> list[Order]:
    """One order for each workload, so that all together compute the fewest bytes; among equals, the fewest changes.

    Beyond `MOST_COMPARED`, workloads are improved one after the other, beginning with the best order of each alone or
    with the order that most of its rows choose by themselves. The first of each workload's `choices` is its present
    order.
    """

    def cost(orders: Sequence[Order]) -> tuple[int, int, Sequence[Order]]:
        num_moved = sum(order != choice[0] for order, choice in zip(orders, choices, strict=True))
        return count_bytes(workloads, orders), num_moved, orders

    alone = [
        choice[int(np.argmin(texts.count_alone(choice)))] if len(choice) > 1 else choice[0]
        for texts, choice in zip(workloads, choices, strict=True)
    ]
    if len(workloads) == 1:
        return alone
    num_rows = sum(len(texts.hashes) for texts in workloads)
    if reduce(mul, map(len, choices), 1) * num_rows <= MOST_COMPARED:
        return list(min(map(cost, product(*choices)))[2])
    own = [choice[0] for choice in choices]
    free = order_rows(workloads, spread_orders(workloads, own), [len(choice) == 1 for choice in choices])
    return _descend(min((own, alone, list(map(find_most_frequent, free))), key=cost), choices, cost)


def spread_orders(workloads: Sequence[PartTexts], orders: Sequence[Order]) -> list[RowOrders]:
    """For each workload, its order repeated for each row."""
    pairs = zip(workloads, orders, strict=True)
    return [np.tile(np.array(order, np.int8), (len(texts.hashes), 1)) for texts, order in pairs]


def _descend(
    orders: Sequence[Order], choices: Sequence[Sequence[Order]], cost: Callable[[Sequence[Order]], Any]
) -> list[Order]:
    """Change one workload's order at a time, until no change helps."""
    found = list(orders)
    while True:
        before = cost(found)
        for number, choice in enumerate(choices):
            found = min(([*found[:number], order, *found[number + 1 :]] for order in choice), key=cost)
        if cost(found) >= before:
            return found


def find_most_frequent(orders: RowOrders) -> Order:
    """The most frequent order; among equals, the smallest."""
    different, num_rows = np.unique(orders, axis=0, return_counts=True)
    return tuple(int(number) for number in different[np.argmax(num_rows)])


def order_rows(workloads: Sequence[PartTexts], own: Sequence[RowOrders], is_fixed: Sequence[bool]) -> list[RowOrders]:
    """An order for each row, chosen place by place; see the module. Rows that share nothing more keep their own order.

    Args:
        own: the present orders of the rows.
        is_fixed: workloads whose rows keep their orders.
    """
    num_parts = max(texts.hashes.shape[1] for texts in workloads)
    hashes = np.concatenate([_widen(texts.hashes, num_parts) for texts in workloads])
    num_bytes = np.concatenate([_widen(texts.num_bytes, num_parts) for texts in workloads])
    orders = np.concatenate([_widen(rows, num_parts, fill=-1) for rows in own])
    nodes = np.concatenate([np.full(len(texts.hashes), texts.head, np.uint64) for texts in workloads])
    has_order = np.concatenate([np.full(len(rows), is_so) for rows, is_so in zip(own, is_fixed, strict=True)])
    is_left = np.zeros(hashes.shape, bool)
    rows, places = np.nonzero(orders >= 0)
    is_left[rows, orders[rows, places]] = True
    chosen = orders.copy()
    for place in range(num_parts):
        open_rows = np.flatnonzero(is_left.any(axis=1))
        own_orders, may_take = orders[open_rows], is_left[open_rows]
        # For each row, the first part of its own order that has no place yet.
        is_next = np.take_along_axis(may_take, np.maximum(own_orders, 0).astype(np.int64), axis=1) & (own_orders >= 0)
        own_next = np.take_along_axis(own_orders, is_next.argmax(axis=1)[:, None], axis=1)[:, 0].astype(np.int64)
        fixed = np.flatnonzero(has_order[open_rows])
        may_take[fixed] = False
        may_take[fixed, own_next[fixed]] = True
        groups = mix(nodes[open_rows, None], hashes[open_rows])
        picked = _pick_parts(groups, num_bytes[open_rows], may_take, own_next)
        chosen[open_rows, place] = picked
        is_left[open_rows, picked] = False
        nodes[open_rows] = mix(nodes[open_rows], hashes[open_rows, picked])
    ends = np.cumsum([len(rows) for rows in own])[:-1]
    return [found[:, : rows.shape[1]] for found, rows in zip(np.split(chosen, ends), own, strict=True)]


def _widen(values: npt.NDArray[Any], num_columns: int, fill: int = 0) -> npt.NDArray[Any]:
    missing = num_columns - values.shape[1]
    return np.pad(values, ((0, 0), (0, missing)), constant_values=fill)


def _pick_parts(groups: Hashes, num_bytes: Ints, may_take: Bools, own_next: Ints) -> Ints:
    """The part that each row puts next.

    In every round, each row wants the part whose group saves it most text, and a group is taken if all its rows want
    it; for the best group that is always so. The result is that of taking groups one by one, best first. A part that
    the rows of a group share with more rows goes before the group's own part, so that those rows can still join.

    Args:
        groups: ``[num_rows, num_parts]``; rows with the same beginning and the same text in a part form a group.
        may_take: whether the row may put the part next; true for at least one part.
        own_next: the part that a row puts next if it shares nothing.
    """
    may_take, picked = may_take.copy(), own_next.copy()
    is_waiting = np.ones(len(groups), bool)
    for number in range(MOST_ROUNDS):
        codes, sizes, saved, first = _weigh_groups(groups, num_bytes, may_take)
        num_groups = len(sizes)
        by_rank = np.lexsort((-sizes, -saved))
        ranks = np.empty(num_groups + 1, np.int64)
        ranks[by_rank], ranks[num_groups] = np.arange(num_groups), num_groups
        wanted = by_rank[ranks[codes].min(axis=1)]
        is_taken = np.bincount(wanted, minlength=num_groups)[wanted] == sizes[wanted]
        if number == MOST_ROUNDS - 1:
            is_taken[:] = True
        is_waiting &= saved[wanted] > 0
        rows = np.flatnonzero(is_waiting & is_taken)
        picked[rows] = (codes[rows] == first[wanted[rows]][:, None]).argmax(axis=1)
        may_take[rows] = False
        may_take[rows, picked[rows]] = True
        is_waiting[rows] = False
        if not is_waiting.any():
            break
    return picked


def _weigh_groups(groups: Hashes, num_bytes: Ints, may_take: Bools) -> tuple[Ints, Ints, Ints, Ints]:
    """Groups of rows with the same beginning that could continue with the same part.

    Returns:
        ``[num_rows, num_parts]``: number of the group; if the row may not take the part, the number of groups. Of each
        group: its number of rows; bytes times 1024 that it saves each of its rows, by the part and all others that its
        rows share; and of these parts, the one that most rows share, as the number of its group.
    """
    rows, parts = np.nonzero(may_take)
    _, firsts, inverse, sizes = np.unique(
        groups[rows, parts], return_index=True, return_inverse=True, return_counts=True
    )
    codes = np.full(groups.shape, len(sizes))
    codes[rows, parts] = inverse
    members = codes[rows[firsts]]  # the groups of one row of each group include those that all its rows share
    is_common = members < len(sizes)
    for part in range(groups.shape[1]):
        having = np.flatnonzero(may_take[:, part])
        mine = codes[having, part]
        for other in range(groups.shape[1]):
            differs = (codes[having] != members[mine, other][:, None]).all(axis=1)
            is_common[mine[differs], other] = False
    saved_alone = np.append(num_bytes[rows[firsts], parts[firsts]] * 1024 * (sizes - 1) // sizes, 0)
    widest = np.where(is_common, np.append(sizes, 0)[members], 0).argmax(axis=1)
    saved = np.where(is_common, saved_alone[members], 0).sum(axis=1)
    return codes, sizes, saved, members[np.arange(len(sizes)), widest]
