"""Padded, length-ordered, prepacked and ragged prefill over batch sizes (Prepacking sections 4.2 and 4.4)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.papers.configurations import Settings, describe
from benchmarks.papers.lab import Lab, Trial
from benchmarks.papers.table import Cell, Plot, Table
from engine import Request
from engine.model.model_shape import ModelShape

BATCH_SIZES = (4, 8, 16, 32)
NUM_PROMPTS = 32
MEDIAN_TOKENS, SPREAD, MOST_TOKENS = 32, 0.9, 256
NUM_REPEATS = 3
BATCH: Settings = {"sharing": "none", "order": "fcfs", "batching": "static", "prefill": "whole"}
PACKINGS: Mapping[str, Settings] = {
    "padded": {**BATCH, "packing": "padded"},
    "length-ordered": {**BATCH, "packing": "length_ordered"},
    "prepacked": {**BATCH, "packing": "prepacked"},
    "ragged": {**BATCH, "packing": "ragged"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The size of prompts under one packing, in batches of one size.

    Attributes:
        num_rows: computed rows with padding.
        most_rows: rows of the largest step.
    """

    num_rows: int
    most_rows: int

    @classmethod
    def of(cls, packing: str, lengths: Sequence[int], batch_size: int) -> "Layout":
        lengths = sorted(lengths) if packing == "length-ordered" else lengths
        batches = [lengths[start : start + batch_size] for start in range(0, len(lengths), batch_size)]
        if packing in ("padded", "length-ordered"):
            sizes = [len(batch) * max(batch) for batch in batches]
        else:
            sizes = [sum(batch) for batch in batches]
        # Prepacked: a step is a bin that is as long as the longest prompt.
        most_rows = max(lengths) if packing == "prepacked" else max(sizes)
        return cls(num_rows=sum(sizes), most_rows=most_rows)


def prepacking(lab: Lab) -> Table:
    """Each packing at each batch size; batches are prefilled and give one token per prompt."""
    prompts = _prompts(lab.vocab_size)
    lengths = [len(prompt.token_ids) for prompt in prompts]
    rows: list[list[Cell]] = []
    speedups: dict[str, list[tuple[float, float]]] = {name: [] for name in PACKINGS}
    memory: dict[str, list[tuple[float, float]]] = {name: [] for name in PACKINGS}
    for batch_size in BATCH_SIZES:
        runs = lab.measure(dict(_trials(prompts, batch_size)), num_repeats=NUM_REPEATS)
        base = runs["padded"].seconds
        for name, run in runs.items():
            layout = Layout.of(name, lengths, batch_size)
            step_mib = layout.most_rows * _row_bytes(lab.shape) / 2**20
            speedups[name].append((batch_size, base / run.seconds))
            memory[name].append((batch_size, step_mib))
            rows.append(
                [
                    batch_size, name, describe({**PACKINGS[name], "max_running_requests": batch_size}),
                    layout.num_rows, f"{1 - sum(lengths) / layout.num_rows:.0%}",
                    round(step_mib, 1), round(run.seconds, 3), round(base / run.seconds, 2),
                ]
            )  # fmt: skip
    return Table(
        method=(
            f"{lab.text}; {NUM_PROMPTS} prompts of {min(lengths)} to {max(lengths)} tokens, log-normal, "
            f"{sum(lengths) / len(lengths):.0f} on average; medians of {NUM_REPEATS} interleaved runs; memory computed "
            "from the model's shape"
        ),
        columns=(
            "batch size", "packing", "configuration", "tokens computed", "padding",
            "KV and activations of the largest step, MiB", "prefill, s", "over padded",
        ),
        rows=rows,
        plots=[
            Plot(
                slug="prepacking",
                title="Prefill, times as fast as padded",
                kind="lines",
                labels=["batch size", "times as fast"],
                series=speedups,
            ),
            Plot(
                slug="memory",
                title="KV and activations of the largest step",
                kind="lines",
                labels=["batch size", "MiB"],
                series=memory,
            ),
        ],
    )  # fmt: skip


def _prompts(vocab_size: int) -> list[Request]:
    rng = np.random.default_rng(3)
    lengths = np.clip(rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, NUM_PROMPTS), 8, MOST_TOKENS).astype(int)
    return [
        Request(request_id=f"{number:02}", token_ids=rng.integers(3, vocab_size, length), max_new_tokens=1)
        for number, length in enumerate(lengths.tolist())
    ]


def _trials(prompts: Sequence[Request], batch_size: int) -> Iterator[tuple[str, Trial]]:
    """A step is a batch; when prepacked, a bin as long as the longest prompt."""
    longest = max(len(prompt.token_ids) for prompt in prompts)
    for name, settings in PACKINGS.items():
        is_sorted = name == "length-ordered"
        limits = {
            "max_running_requests": batch_size,
            "max_num_batched_tokens": longest * (1 if name == "prepacked" else batch_size),
        }
        requests = sorted(prompts, key=lambda prompt: len(prompt.token_ids)) if is_sorted else prompts
        yield name, Trial(settings={**settings, **limits}, kv_tokens=2 * NUM_PROMPTS * longest, requests=requests)


def _row_bytes(shape: ModelShape) -> int:
    """Bytes of a token: its KV, and the activations in a layer: residual stream, norm, gate, up, their product."""
    return shape.kv_bytes_per_token + (2 * shape.hidden_size + 3 * shape.intermediate_size) * shape.value_bytes
