"""Finds the order of a template's fields in which prompts share the longest prefixes, from the fields' values alone.

A field moves together with the text in front of it, so "Question: {query_text}" stays together. Ratios of two orders
can be compared with each other, but not with the ratio of a plan; see `tasks.layouts.estimate`.
"""

from collections.abc import Sequence
from itertools import permutations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tasks.forecast.forecast import FieldOrder
from tasks.layouts.estimate import Ints, PartTexts
from tasks.layouts.parts import Order
from tasks.storage.artifact import ArtifactRef, open_parquet
from tasks.workloads.workload import Prompt

MOST_FIELDS = 8
"""Most fields of a template whose orders are compared; eight fields have 40,320 orders."""


def order_fields(requests: ArtifactRef, row_ids: Ints, prompt: Prompt) -> list[FieldOrder]:
    """Orders of a template's fields over some rows, best first; empty if it has one field, or more than `MOST_FIELDS`.

    Args:
        requests, row_ids: with the rows' texts, and the rows to count.
    """
    segments = [(literal, field) for literal, field in prompt.segments if field is not None]
    if not 2 <= len(segments) <= MOST_FIELDS:
        return []
    with open_parquet(requests) as file:
        table = file.read(columns=list(prompt.fields)).take(pa.array(np.sort(row_ids)))
    values = [table.column(field).combine_chunks().fill_null("") for _, field in segments]
    texts = PartTexts(
        head=0,
        hashes=np.stack([each.dictionary_encode().indices.to_numpy().astype(np.uint64) for each in values], axis=1),
        num_bytes=np.stack([pc.binary_length(each).to_numpy().astype(np.int64) for each in values], axis=1)
        + np.array([len(literal.encode()) for literal, _ in segments]),
    )
    tail = "".join(literal for literal, field in prompt.segments if field is None)
    names = [field for _, field in segments]
    return compare_field_orders(names, texts, len(prompt.system.encode()), len(tail.encode()))


def compare_field_orders(
    names: Sequence[str], texts: PartTexts, num_head_bytes: int, num_tail_bytes: int
) -> list[FieldOrder]:
    """The template's own order, and for each field the best order that begins with it; best first.

    Args:
        names, texts: of the fields, in the template's order, each with the text in front of it.
        num_head_bytes, num_tail_bytes: of the text at the beginning and at the end of every prompt.
    """
    if not len(texts.hashes):
        return []
    orders = list(permutations(range(len(names))))
    num_bytes = dict(zip(orders, texts.count_alone(orders), strict=True))
    best: dict[int, Order] = {}
    for order in sorted(orders, key=lambda order: (num_bytes[order], order)):
        best.setdefault(order[0], order)
    (num_prompts,) = (len(hashes) for hashes, _ in [*texts.beginnings(orders[0])][-1:])
    fixed = num_head_bytes + num_tail_bytes * num_prompts
    total = len(texts.hashes) * (num_head_bytes + num_tail_bytes) + int(texts.num_bytes.sum())
    found = [
        FieldOrder(
            fields=tuple(names[field] for field in order),
            saving_ratio=1.0 - (fixed + num_bytes[order]) / total if total else 0.0,
            is_current=order == orders[0],
        )
        for order in dict.fromkeys([orders[0], *best.values()])
    ]
    return sorted(found, key=lambda order: (-order.saving_ratio, not order.is_current))
