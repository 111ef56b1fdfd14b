"""Reordering and memory-centric token batching: steps, valleys and time excluding the cool-down (BatchLLM 6.3.2)."""

from collections.abc import Sequence

from benchmarks.papers.case_workload import CASE_1
from benchmarks.papers.configurations import Settings, describe, simulated_config
from benchmarks.papers.simulated import A100, SimulatedRun
from benchmarks.papers.table import Cell, Plot, Table
from engine.kernels import cdiv

BASE: Settings = {"order": "fcfs", "max_running_requests": 256, "output_reserve": 0.0}
STEPS: Sequence[tuple[str, Settings]] = (
    ("none", BASE),
    ("reordering", {**BASE, "order": "ratio"}),
    ("memory-centric", {**BASE, "max_running_requests": "memory"}),
    ("both", {"output_reserve": 0.0}),
    ("both, room kept for answers (default)", {}),
)
SHARINGS = {"none": "without sharing", "group": "with sharing"}
NUM_POINTS = 240


def token_batching() -> Table:
    """Ten configurations on one workload; the plots are the tokens of each step, as the paper's Fig. 2 and 6."""
    requests = CASE_1.requests()
    rows: list[list[Cell]] = []
    plots = []
    for sharing, sharing_name in SHARINGS.items():
        runs = {
            name: (settings, A100.run(requests, simulated_config({**settings, "sharing": sharing})))
            for name, settings in STEPS
        }
        base = runs["none"][1]
        rows += [
            [
                sharing_name, name, describe({**settings, "sharing": sharing}), run.summary.num_steps,
                run.num_warm_steps, round(run.mean_tokens), round(run.valley_share, 4),
                run.summary.num_preempted_requests, round(run.warm_seconds, 1),
                round(run.warm_seconds / base.warm_seconds, 3), round(run.seconds / base.seconds, 3),
            ]
            for name, (settings, run) in runs.items()
        ]  # fmt: skip
        plots.append(
            Plot(
                slug=f"tokens-per-step-{sharing_name.replace(' ', '-')}",
                title=f"Tokens per step, {sharing_name}",
                kind="lines",
                labels=["step", "tokens, mean of neighbouring steps"],
                series={name: _tokens_by_step(run) for name, (_, run) in runs.items() if name in ("none", "both")},
            )
        )
    return Table(
        method=f"{A100.text}; case 1 at full length ({CASE_1.num_requests:,} requests), 2,048 tokens a step at most",
        columns=(
            "sharing", "batching", "configuration", "steps", "before cool-down", "tokens a step", "valleys",
            "preempted", "TECD, s", "TECD over none", "whole time over none",
        ),
        rows=rows,
        plots=plots,
    )  # fmt: skip


def _tokens_by_step(run: SimulatedRun) -> list[tuple[float, float]]:
    """Neighbouring steps as one point, as many as a picture can show."""
    tokens = [step.record.num_tokens for step in run.steps]
    width = cdiv(len(tokens), NUM_POINTS)
    return [
        (start + len(part) / 2, round(sum(part) / len(part), 1))
        for start in range(0, len(tokens), width)
        if (part := tokens[start : start + width])
    ]
