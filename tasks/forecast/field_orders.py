"""Finds the order of a template's fields in which prompts share the longest prefixes, from the fields' values alone.

A field moves together with the text in front of it, so "Question: {query_text}" stays together. Two rows share a prefix
as far as their fields are equal, in order. Values that begin alike and then differ count as different, so the result is
a lower bound. Text is counted in bytes, which are about proportional to tokens: ratios of two orders can be compared
with each other, but not with the ratio of a plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from engine.errors import WorkloadError
from tasks.storage.artifact import ArtifactRef, open_parquet
from tasks.workloads.workload import Prompt

MOST_FIELDS = 8
"""All sets of fields are compared: 256 for eight fields."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FieldColumn:
    """One field of a template over all rows.

    Attributes:
        name: of the field.
        codes: int64 ``[num_rows]``; rows with equal values have equal codes.
        num_bytes: int64 ``[num_rows]``: bytes of the value and of the text in front of it.
    """

    name: str
    codes: Ints
    num_bytes: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldOrder:
    """An order of the fields and the share of text it saves.

    Attributes:
        fields: names, first to last.
        saving_ratio: share of bytes that are not computed again, 0 to 1 (Eq. 2 of BatchLLM, in bytes).
        is_current: the template's own order.
    """

    fields: tuple[str, ...]
    saving_ratio: float
    is_current: bool


def order_fields(requests: ArtifactRef, row_ids: Ints, prompt: Prompt) -> list[FieldOrder]:
    """Orders of a template's fields over some rows, best first; empty if it has one field, or more than `MOST_FIELDS`.

    Args:
        requests: with the rows' texts.
        row_ids: of the rows to count.
        prompt: with the template.
    """
    segments = [(literal, field) for literal, field in prompt.segments if field is not None]
    if not 2 <= len(segments) <= MOST_FIELDS:
        return []
    with open_parquet(requests) as file:
        table = file.read(columns=list(prompt.fields)).take(pa.array(np.sort(row_ids)))
    columns = []
    for literal, field in segments:
        values = table.column(field).combine_chunks().fill_null("")
        codes = values.dictionary_encode().indices.to_numpy().astype(np.int64)
        num_bytes = pc.binary_length(values).to_numpy().astype(np.int64) + len(literal.encode())
        columns.append(FieldColumn(name=field, codes=codes, num_bytes=num_bytes))
    tail = "".join(literal for literal, field in prompt.segments if field is None)
    return compare_field_orders(columns, len(prompt.system.encode()), len(tail.encode()))


def compare_field_orders(columns: Sequence[FieldColumn], num_head_bytes: int, num_tail_bytes: int) -> list[FieldOrder]:
    """The template's own order, and for each field the best order that begins with it; best first.

    The cost of an order is a sum over its fields, and a field's term depends on the set of fields before it, not on
    their order. So the best order is found by dynamic programming over sets instead of permutations.

    Args:
        columns: the fields in the template's order, all with the same number of rows.
        num_head_bytes: of the text at the beginning of every prompt.
        num_tail_bytes: of the text at the end of every prompt.
    Raises:
        WorkloadError: more fields than `MOST_FIELDS`.
    """
    num_fields = len(columns)
    if num_fields > MOST_FIELDS:
        raise WorkloadError(f"orders of {num_fields} fields cannot be compared, at most of {MOST_FIELDS}")
    num_rows = len(columns[0].codes) if columns else 0
    if num_rows == 0:
        return []
    total = num_rows * (num_head_bytes + num_tail_bytes) + sum(int(column.num_bytes.sum()) for column in columns)
    num_distinct, costs = _count_sets(columns)
    everything = frozenset(range(num_fields))
    fixed = num_head_bytes + num_tail_bytes * num_distinct[everything]

    def cost(before: frozenset[int], field: int) -> int:
        return costs[before | {field}, field]

    # The cheapest order of the remaining fields after each set of fields, from the last field backwards.
    best: dict[frozenset[int], tuple[int, tuple[int, ...]]] = {everything: (0, ())}
    for size in range(num_fields - 1, 0, -1):
        for chosen in map(frozenset, combinations(range(num_fields), size)):
            best[chosen] = min(
                (cost(chosen, field) + best[chosen | {field}][0], (field, *best[chosen | {field}][1]))
                for field in sorted(everything - chosen)
            )
    current = tuple(range(num_fields))
    found = {current: sum(cost(frozenset(range(field)), field) for field in current)}
    for field in current:
        rest_cost, rest = best[frozenset((field,))]
        found.setdefault((field, *rest), cost(frozenset(), field) + rest_cost)
    orders = [
        FieldOrder(
            fields=tuple(columns[field].name for field in order),
            saving_ratio=1.0 - (fixed + computed) / total if total else 0.0,
            is_current=order == current,
        )
        for order, computed in found.items()
    ]
    return sorted(orders, key=lambda order: (-order.saving_ratio, not order.is_current))


def _count_sets(
    columns: Sequence[FieldColumn],
) -> tuple[dict[frozenset[int], int], dict[tuple[frozenset[int], int], int]]:
    """For each set of fields, the number of distinct combinations of their values, and the bytes of each field summed
    over these combinations."""
    num_distinct: dict[frozenset[int], int] = {}
    costs: dict[tuple[frozenset[int], int], int] = {}
    smaller: dict[frozenset[int], Ints] = {frozenset(): np.zeros(len(columns[0].codes), dtype=np.int64)}
    for size in range(1, len(columns) + 1):
        combined: dict[frozenset[int], Ints] = {}
        for chosen in map(frozenset, combinations(range(len(columns)), size)):
            last = max(chosen)
            codes = columns[last].codes
            joined = smaller[chosen - {last}] * (int(codes.max()) + 1) + codes
            _, first_rows, combined[chosen] = np.unique(joined, return_index=True, return_inverse=True)
            num_distinct[chosen] = len(first_rows)
            for field in chosen:
                costs[chosen, field] = int(columns[field].num_bytes[first_rows].sum())
        smaller = combined
    return num_distinct, costs
