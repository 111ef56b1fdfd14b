"""Encodes prompts of rows that differ in the order of their parts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tasks.prompts.prompt import PromptEncoder, Tokens, workload_format
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload import Workload

ROW_LAYOUT = "row_layout"
"""Column of requests with the order of a row's parts; empty for the order of the workload's template."""


class RowEncoder:
    """Holds a `PromptEncoder` for each order. Use one for a whole table, in one thread."""

    def __init__(self, workload: Workload, codec: TextCodec) -> None:
        assert workload.row_layouts is not None, "rows have orders of their own"
        self._workload = workload
        self._codec = codec
        self._templates = {"": workload.prompt.template, **workload.row_layouts.templates}
        self._encoders: dict[str, PromptEncoder] = {}

    def encode(self, rows: Sequence[Mapping[str, str]]) -> list[Tokens]:
        """See `PromptEncoder.encode`; a row's value for `ROW_LAYOUT` is its order."""
        prompts: dict[int, Tokens] = {}
        for order in dict.fromkeys(row[ROW_LAYOUT] for row in rows):
            numbers = [number for number, row in enumerate(rows) if row[ROW_LAYOUT] == order]
            encoded = self._find_encoder(order).encode([rows[number] for number in numbers])
            prompts.update(zip(numbers, encoded, strict=True))
        return [prompts[number] for number in range(len(rows))]

    def _find_encoder(self, order: str) -> PromptEncoder:
        if order not in self._encoders:
            prompt = replace(self._workload.prompt, template=self._templates[order])
            form = workload_format(prompt, self._workload.kind.thinking, self._codec)
            self._encoders[order] = PromptEncoder(form, self._codec)
        return self._encoders[order]
