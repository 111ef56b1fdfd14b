"""Encodes the prompts of rows whose parts have orders of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from tasks.prompts.prompt import Encode, PromptEncoder, Tokens, workload_format
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload import Workload

ROW_LAYOUT = "row_layout"
"""Column of requests with the order of a row's parts; empty for the order of the workload's template."""


def encode_by_layout(workload: Workload, codec: TextCodec) -> Encode:
    """As `PromptEncoder.encode`, with each row's value for `ROW_LAYOUT` as its order. For one table, in one thread."""
    assert workload.row_layouts is not None, "rows have orders of their own"
    templates = {"": workload.prompt.template, **workload.row_layouts.templates}

    @cache
    def find_encoder(order: str) -> PromptEncoder:
        prompt = replace(workload.prompt, template=templates[order])
        return PromptEncoder(workload_format(prompt, workload.kind.thinking, codec), codec)

    def encode(rows: Sequence[Mapping[str, str]]) -> list[Tokens]:
        prompts: dict[int, Tokens] = {}
        for order in dict.fromkeys(row[ROW_LAYOUT] for row in rows):
            numbers = [number for number, row in enumerate(rows) if row[ROW_LAYOUT] == order]
            encoded = find_encoder(order).encode([rows[number] for number in numbers])
            prompts.update(zip(numbers, encoded, strict=True))
        return [prompts[number] for number in range(len(rows))]

    return encode
