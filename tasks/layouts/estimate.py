"""Which orders of several templates' parts let their prompts share most, computed from the rows' texts alone.

Prompts share a beginning as far as their parts are equal: rows and parts are chosen together, as SOLO and the GGR
algorithm of "Optimizing LLM Queries in Relational Data Analytics Workloads" (section 4) do, but with one order a
workload, so that all its rows are asked alike. Text is counted in bytes, which are about proportional to tokens. Parts
that begin alike and then differ count as different, so the sharing that is found is a lower bound.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from hashlib import blake2b
from itertools import combinations, product
from operator import mul
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from tasks.layouts.parts import Order, Parts
from tasks.storage.artifact import ArtifactRef, open_parquet
from tasks.workloads.workload import Workload

MOST_COMBINATIONS = 600
"""Of orders of all workloads that are all compared; where there are more, one workload after the other is."""

Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartTexts:
    """The parts of one workload over its rows.

    Attributes:
        head: hash of what stands before the parts.
        hashes: uint64 ``[num_rows]`` of each part; rows whose texts are equal have equal ones, in all workloads.
        num_bytes: int64 ``[num_rows]`` of each part.
    """

    head: int
    hashes: tuple[Hashes, ...]
    num_bytes: tuple[Ints, ...]
    _known: dict[Order, tuple[Hashes, Ints]] = field(default_factory=dict)

    def beginnings(self, order: Order) -> tuple[Hashes, Ints]:
        """The different prompts up to the last part of `order`: a hash of each, and the bytes of that part."""
        if order not in self._known:
            chained = self._chain(order)
            found, rows = np.unique(chained, return_index=True)
            self._known[order] = found, self.num_bytes[order[-1]][rows]
        return self._known[order]

    def _chain(self, order: Order) -> Hashes:
        chained = np.full(len(self.hashes[0]), self.head, np.uint64)
        for number in order:
            chained = (chained ^ self.hashes[number]) * _FACTOR
            chained ^= chained >> _SHIFT
        return chained


def read_part_texts(requests: ArtifactRef, workload: Workload, parts: Parts) -> PartTexts:
    """The texts of a workload's rows, part by part; rows with an error are left out.

    Args:
        requests: of the workload.
        workload: whose rows they are.
        parts: of its template.
    """
    with open_parquet(requests) as file:
        table = file.read(columns=["error", *workload.prompt.fields])
    table = table.filter(pc.is_null(table.column("error")))
    hashed, sizes = {}, {}
    for name in workload.prompt.fields:
        column = table.column(name).cast("large_binary").combine_chunks().fill_null(b"").dictionary_encode()
        values = np.array([_hash(value) for value in column.dictionary.to_pylist()] or [0], np.uint64)
        lengths = np.array([len(value) for value in column.dictionary.to_pylist()] or [0], np.int64)
        codes = column.indices.to_numpy()
        hashed[name], sizes[name] = values[codes], lengths[codes]
    hashes, num_bytes = [], []
    for text in parts.parts:
        names = re.findall(r"\{(\w+)\}", text.replace("{{", "").replace("}}", ""))
        literal = re.sub(r"\{\w+\}", "{}", text)
        combined = np.full(table.num_rows, _hash(literal.encode()), np.uint64)
        for name in names:
            combined = (combined ^ hashed[name]) * _FACTOR
            combined ^= combined >> _SHIFT
        hashes.append(combined)
        num_bytes.append(sum((sizes[name] for name in names), np.full(table.num_rows, len(literal), np.int64)))
    prompt = workload.prompt
    head = f"{prompt.chat}\n{prompt.system if prompt.chat else ''}\n{parts.head}"
    return PartTexts(head=_hash(head.encode()), hashes=tuple(hashes), num_bytes=tuple(num_bytes))


def count_bytes(workloads: Sequence[PartTexts], orders: Sequence[Order]) -> int:
    """Bytes of the parts that have to be computed where all prompts share what they can.

    Args:
        workloads: answered as one batch.
        orders: of each.
    """
    found = [
        texts.beginnings(order[:length])
        for texts, order in zip(workloads, orders, strict=True)
        for length in range(1, len(order) + 1)
    ]
    if len(workloads) == 1 or not found:
        return sum(int(num_bytes.sum()) for _, num_bytes in found)
    hashes, num_bytes = (np.concatenate(column) for column in zip(*found, strict=True))
    _, first = np.unique(hashes, return_index=True)
    return int(num_bytes[first].sum())


def find_orders(workloads: Sequence[PartTexts], choices: Sequence[Sequence[Order]]) -> list[Order]:
    """The orders that compute the fewest bytes together; of equal ones, those that change fewest.

    Where there are more than `MOST_COMBINATIONS`, workloads are improved one after the other, beginning with the best
    order of each alone and with the best ones of each two.

    Args:
        workloads: answered as one batch.
        choices: orders of each; the first one is its own so far.
    """

    def cost(orders: Sequence[Order]) -> tuple[int, int, Sequence[Order]]:
        num_moved = sum(order != choice[0] for order, choice in zip(orders, choices, strict=True))
        return count_bytes(workloads, orders), num_moved, orders

    def best_of(numbers: Sequence[int]) -> tuple[Order, ...]:
        some = [workloads[number] for number in numbers]
        return min(product(*(choices[number] for number in numbers)), key=lambda orders: count_bytes(some, orders))

    if reduce(mul, map(len, choices), 1) <= MOST_COMBINATIONS:
        return list(min(map(cost, product(*choices)))[2])
    alone = [best_of([number])[0] for number in range(len(workloads))]
    starts = [alone]
    for one, other in combinations(range(len(workloads)), 2):
        starts.append([*alone])
        starts[-1][one], starts[-1][other] = best_of([one, other])
    return list(min(cost(_descend(start, choices, cost)) for start in starts)[2])


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


def _hash(value: bytes) -> int:
    return int.from_bytes(blake2b(value, digest_size=8).digest(), "little")
