"""The choices of the batching notes: when requests start, whole or chunked prefill, order, preemption."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.papers.case_workload import CASE_1, Case, longest_tokens
from benchmarks.papers.configurations import Settings, describe, simulated_config
from benchmarks.papers.lab import Lab, Trial
from benchmarks.papers.simulated import A100
from benchmarks.papers.table import Cell, Plot, Table
from engine import Request

CASE = replace(CASE_1, num_requests=1000, answer_spread=0.9)
URGENT_EVERY = 8
TIGHT: Settings = {"output_reserve": 0.0}
CAPPED: Settings = {"max_running_requests": 64}
"""Fewer than all requests, else the ways of batching would not differ."""

QUESTIONS: Mapping[str, Mapping[str, Settings]] = {
    "batching": {name: {**CAPPED, "batching": name} for name in ("static", "dynamic", "continuous")},
    "prefill": {name: {"prefill": name} for name in ("whole", "chunked")},
    "order": {name: {**CAPPED, "sharing": "none", "order": name} for name in ("fcfs", "sjf", "priority", "ratio")},
    "preemption": {name: {**TIGHT, "preemption": name} for name in ("recompute", "swap", "kill")},
}
MEASURED_QUESTIONS: Mapping[str, Mapping[str, Settings]] = {
    **QUESTIONS,
    "disaggregation": {name: {"disaggregation": name} for name in ("none", "processes")},
}
"""With disaggregation, which cannot be simulated, since a simulation has one device."""

SCALE, NUM_REQUESTS, CHUNK_TOKENS, CAP = 0.1, 32, 256, 8
NUM_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The figures of one configuration; urgent_completion_seconds is None if completion times are unknown."""

    question: str
    name: str
    settings: Settings
    num_steps: int
    num_tokens: int
    num_preempted: int
    num_errors: int
    seconds: float
    mean_completion_seconds: float
    urgent_completion_seconds: float | None


def simulated_notes() -> Table:
    """Every choice at full length on an A100; preemption in a fiftieth of its memory."""
    requests = make_requests(CASE)
    outcomes = []
    for question, choices in QUESTIONS.items():
        kv_bytes = A100.kv_bytes // (50 if question == "preemption" else 1)
        for name, settings in choices.items():
            run = A100.run(requests, simulated_config(settings), kv_bytes=kv_bytes)
            summary = run.summary
            outcomes.append(
                Outcome(
                    question=question, name=name, settings=settings, num_steps=summary.num_steps,
                    num_tokens=summary.num_prompt_tokens + summary.num_decode_tokens,
                    num_preempted=summary.num_preempted_requests,
                    num_errors=len(requests) - summary.num_finished_requests, seconds=run.seconds,
                    mean_completion_seconds=run.mean_completion_seconds, urgent_completion_seconds=None,
                )
            )  # fmt: skip
    method = (
        f"{A100.text}; {len(requests):,} requests of case 1, {_answers(requests)}; copies to host memory take no time"
    )
    return _table(method, outcomes)


def measured_notes(lab: Lab) -> Table:
    """The same with lengths scaled down, measured on the CPU."""
    requests = make_requests(CASE.scaled(SCALE, NUM_REQUESTS), vocab_size=lab.vocab_size)
    outcomes = [outcome for question in MEASURED_QUESTIONS for outcome in _measured(lab, question, requests)]
    method = (
        f"{lab.text}; {len(requests)} requests of case 1, lengths times {SCALE}, {_answers(requests)}, "
        f"{CHUNK_TOKENS} tokens a step, medians of {NUM_REPEATS} interleaved runs"
    )
    return _table(method, outcomes)


def make_requests(case: Case, **options: int) -> list[Request]:
    """Shuffled requests; every eighth one is urgent, and answer lengths are known beforehand, as "sjf" needs."""
    return [
        replace(request, priority=int(row % URGENT_EVERY == 0), expected_output_tokens=request.max_new_tokens)
        for row, request in enumerate(case.requests(**options))
    ]


def _measured(lab: Lab, question: str, requests: Sequence[Request]) -> Iterator[Outcome]:
    all_tokens = sum(len(request.token_ids) + request.max_new_tokens + 32 for request in requests)
    kv_tokens = longest_tokens(requests) * 2 if question == "preemption" else all_tokens
    choices = {name: _scaled(settings) for name, settings in MEASURED_QUESTIONS[question].items()}
    trials = {
        name: Trial(settings=settings, kv_tokens=kv_tokens, requests=requests) for name, settings in choices.items()
    }
    for name, run in lab.measure(trials, num_repeats=NUM_REPEATS).items():
        urgent = [request for request in requests if request.priority]
        yield Outcome(
            question=question, name=name, settings=choices[name], num_steps=len(run.steps), num_tokens=run.num_tokens,
            num_preempted=run.num_preempted, num_errors=run.num_errors, seconds=run.seconds,
            mean_completion_seconds=run.mean_completion_seconds(requests),
            urgent_completion_seconds=run.mean_completion_seconds(urgent),
        )  # fmt: skip


def _scaled(settings: Settings) -> Settings:
    cap = {"max_running_requests": CAP} if "max_running_requests" in settings else {}
    return {**settings, "max_num_batched_tokens": CHUNK_TOKENS, **cap}


def _answers(requests: Sequence[Request]) -> str:
    lengths = [request.max_new_tokens for request in requests]
    return f"answers of {min(lengths)} to {max(lengths)} tokens"


def _table(method: str, outcomes: Sequence[Outcome]) -> Table:
    first = {outcome.question: outcome.seconds for outcome in reversed(outcomes)}
    knows_urgent = any(outcome.urgent_completion_seconds is not None for outcome in outcomes)
    rows: list[list[Cell]] = [
        [
            outcome.question, outcome.name, describe(outcome.settings), outcome.num_steps,
            round(outcome.num_tokens / outcome.num_steps), outcome.num_tokens, outcome.num_preempted,
            outcome.num_errors, round(outcome.seconds, 2), round(first[outcome.question] / outcome.seconds, 2),
            round(outcome.mean_completion_seconds, 2),
            *([round(outcome.urgent_completion_seconds or 0.0, 2)] if knows_urgent else []),
        ]
        for outcome in outcomes
    ]  # fmt: skip
    return Table(
        method=method,
        columns=(
            "question", "choice", "configuration", "steps", "tokens a step", "tokens computed", "preempted",
            "error rows", "seconds", "times as fast as the first", "mean answer after, s",
            *(["urgent answers after, s"] if knows_urgent else []),
        ),
        rows=rows,
        plots=[
            _plot(question, [outcome for outcome in outcomes if outcome.question == question])
            for question in dict.fromkeys(outcome.question for outcome in outcomes)
        ],
    )  # fmt: skip


def _plot(question: str, outcomes: Sequence[Outcome]) -> Plot:
    return Plot(
        slug=question,
        title=f"Time by {question}",
        kind="bars",
        labels=["seconds"],
        series={
            "whole run": {outcome.name: outcome.seconds for outcome in outcomes},
            "mean answer": {outcome.name: outcome.mean_completion_seconds for outcome in outcomes},
        },
    )
