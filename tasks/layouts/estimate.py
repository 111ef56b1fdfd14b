"""Estimates how much text prompts share in given orders of their parts, from the rows' texts alone.

Prompts share a prefix as far as their parts are equal. Text is counted in bytes, which are about proportional to
tokens. Parts that begin alike and then differ count as different, so the result is a lower bound.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from itertools import combinations

import numpy as np
import numpy.typing as npt

from tasks.database.connection import execute
from tasks.database.opening import open_in_memory
from tasks.layouts.parts import Order, Parts
from tasks.storage.artifact import ArtifactRef, open_parquet
from tasks.workloads.workload import Workload

Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
RowOrders = npt.NDArray[np.int8]
"""``[num_rows, num_parts]``: the order of each row's parts."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_SHIFT = np.uint64(32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartTexts:
    """The texts of one workload's parts, for each row.

    Attributes:
        head: hash of the text before the parts.
        hashes: ``[num_rows, num_parts]``; equal texts have equal hashes, in all workloads.
        num_bytes: ``[num_rows, num_parts]``.
    """

    head: int
    hashes: Hashes
    num_bytes: Ints

    def beginnings(self, orders: Order | RowOrders) -> Iterator[tuple[Hashes, Ints]]:
        """For each number of first parts, the distinct prompt beginnings: their hashes, and the bytes of the last part.
        The orders are of each row, or one for all."""
        chained = np.full(len(self.hashes), self.head, np.uint64)
        rows = np.arange(len(self.hashes))
        for part in orders if isinstance(orders, tuple) else orders.T:
            chained = mix(chained, self.hashes[rows, part])
            different, first = np.unique(chained, return_index=True)
            yield different, self.num_bytes[rows, part][first]

    def count_alone(self, orders: Sequence[Order]) -> list[int]:
        """`count_bytes` of this workload alone, in each of the orders. The bytes that a part adds depend on the set of
        parts before it, not on their order. So sets are counted: five parts have 31 sets, but 120 orders."""
        added: dict[Order, Ints] = {}
        for size in range(1, self.hashes.shape[1] + 1):
            for parts in combinations(range(self.hashes.shape[1]), size):
                chained = reduce(mix, (self.hashes[:, part] for part in parts), np.array([self.head], np.uint64))
                _, first = np.unique(chained, return_index=True)
                added[parts] = self.num_bytes[first].sum(axis=0)
        return [
            sum(int(added[tuple(sorted(order[: place + 1]))][part]) for place, part in enumerate(order))
            for order in orders
        ]


def mix(beginning: Hashes, following: Hashes) -> Hashes:
    """Hashes of texts that consist of a beginning and a following part; broadcasts."""
    mixed = (beginning ^ following) * _FACTOR
    mixed ^= mixed >> _SHIFT
    return mixed


def read_part_texts(requests: ArtifactRef, workload: Workload, parts: Parts) -> PartTexts:
    """The texts of a workload's rows, part by part, without rows that have an error.

    Args:
        requests, workload, parts: of the workload as in its file, whose template has these parts.
    """
    fields, prompt = workload.prompt.fields, workload.prompt
    open_parquet(requests).close()
    with open_in_memory(requests.path) as connection:
        given = {"requests": requests.path, "fields": list(fields)}
        columns = execute(connection, "layouts/hash_fields", given).fetchnumpy()
    num_rows = len(columns[f"hash_{fields[0]}"])
    hashes = np.empty((num_rows, len(parts.parts)), np.uint64)
    num_bytes = np.empty((num_rows, len(parts.parts)), np.int64)
    for number, text in enumerate(parts.parts):
        literal = re.sub(r"\{\w+\}", "{}", text).encode()
        hashes[:, number], num_bytes[:, number] = _hash(literal), len(literal)
        for name in re.findall(r"\{(\w+)\}", text.replace("{{", "").replace("}}", "")):
            hashes[:, number] = mix(hashes[:, number], columns[f"hash_{name}"])
            num_bytes[:, number] += columns[f"size_{name}"]
    head = f"{prompt.chat}\n{prompt.system if prompt.chat else ''}\n{parts.head}"
    return PartTexts(head=_hash(head.encode()), hashes=hashes, num_bytes=num_bytes)


def count_bytes(workloads: Sequence[PartTexts], orders: Sequence[Order | RowOrders]) -> int:
    """Bytes of parts that are computed if all prompts share their equal beginnings."""
    found = [each for texts, order in zip(workloads, orders, strict=True) for each in texts.beginnings(order)]
    if len(workloads) == 1 or not found:
        return sum(int(num_bytes.sum()) for _, num_bytes in found)
    hashes, num_bytes = (np.concatenate(column) for column in zip(*found, strict=True))
    _, first = np.unique(hashes, return_index=True)
    return int(num_bytes[first].sum())


def _hash(value: bytes) -> int:
    return int.from_bytes(blake2b(value, digest_size=8).digest(), "little")
