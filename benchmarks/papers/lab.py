"""Measured runs on the CPU: answers are compared in float32, then all configurations run in interleaved rounds."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.measuring.model_folder import read_model_shape
from benchmarks.measuring.turns import in_turn
from benchmarks.measuring.wrong_answer import WrongAnswerError
from benchmarks.papers.case_workload import longest_tokens
from benchmarks.papers.configurations import Settings
from engine import Completion, Engine, EngineConfig, Request, StepRecord, plan_prefix_groups

NUM_GATE_REQUESTS, MOST_GATE_TOKENS = 8, 8
NUM_WARM_UP_REQUESTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One configuration to measure.

    Attributes:
        settings: fields of `EngineConfig`.
        kv_tokens: tokens whose KV fits in memory.
    """

    settings: Settings
    kv_tokens: int
    requests: Sequence[Request]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """One run of a trial.

    Attributes:
        completion_seconds: from the start of the run to each answer.
    """

    seconds: float
    steps: Sequence[StepRecord]
    completions: Mapping[str, Completion]
    completion_seconds: Mapping[str, float]

    @property
    def num_preempted(self) -> int:
        return sum(step.num_preempted_requests for step in self.steps)

    @property
    def num_tokens(self) -> int:
        """Tokens that steps computed, without padding."""
        return sum(step.num_tokens for step in self.steps)

    @property
    def num_errors(self) -> int:
        return sum(completion.error is not None for completion in self.completions.values())

    def mean_completion_seconds(self, requests: Sequence[Request]) -> float:
        """Mean completion time of the answered requests."""
        found = [self.completion_seconds.get(request.request_id) for request in requests]
        return statistics.fmean(seconds for seconds in found if seconds is not None)


class Lab:
    """A model on this CPU.

    Args:
        model: checkpoint folder.
        name: its name in results.
        dtype: of timed runs; answers are compared in float32.
    """

    def __init__(self, model: Path, *, name: str, dtype: str, num_threads: int) -> None:
        self._model = model
        self._dtype = dtype
        self.num_threads = num_threads
        self.shape = read_model_shape(model, dtype)
        self.text = f"measured: {name}, {dtype}, {num_threads} threads"

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    def measure(self, trials: Mapping[str, Trial], *, num_repeats: int) -> dict[str, MeasuredRun]:
        """By trial, the run of median time. Trials take turns, so that other programs slow down all of them.

        Raises:
            WrongAnswerError: the greedy answers differ in float32.
        """
        self.compare(trials)
        engines = {name: self._load(trial, self._dtype) for name, trial in trials.items()}
        for name, trial in trials.items():
            _run(engines[name], trial.requests[:NUM_WARM_UP_REQUESTS])
        runs: dict[str, list[MeasuredRun]] = {name: [] for name in trials}
        for number in range(num_repeats):
            for name, trial in in_turn(trials.items(), number):
                runs[name].append(_run(engines[name], trial.requests))
                print(f"  {name}: {runs[name][-1].seconds:.2f} s", flush=True)
        return {name: sorted(found, key=lambda run: run.seconds)[num_repeats // 2] for name, found in runs.items()}

    def compare(self, trials: Mapping[str, Trial]) -> None:
        """Compare answers to a part of each workload in float32, in proportionally less memory."""
        expected: dict[str, Sequence[int]] = {}
        for name, trial in trials.items():
            requests = [
                replace(request, max_new_tokens=min(request.max_new_tokens, MOST_GATE_TOKENS))
                for request in sorted(trial.requests, key=lambda request: request.request_id)[:NUM_GATE_REQUESTS]
            ]
            block_size = self._config(trial.settings, "float32", 1).block_size
            least_tokens = longest_tokens(requests) + 2 * block_size
            kv_tokens = max(least_tokens, trial.kv_tokens * len(requests) // len(trial.requests))
            found = _run(self._load(replace(trial, kv_tokens=kv_tokens), "float32"), requests).completions
            for request_id, completion in found.items():
                if completion.error is not None and trial.settings.get("preemption") == "kill":
                    continue
                answer = list(completion.token_ids)
                if answer != expected.setdefault(request_id, answer) or completion.error is not None:
                    raise WrongAnswerError(
                        f"{name}, request {request_id}: {completion.error or answer}, expected {expected[request_id]}"
                    )

    def _load(self, trial: Trial, dtype: str) -> Engine:
        return Engine.load(self._model, self._config(trial.settings, dtype, trial.kv_tokens))

    def _config(self, settings: Settings, dtype: str, kv_tokens: int) -> EngineConfig:
        kv_bytes = kv_tokens * read_model_shape(self._model, dtype).kv_bytes_per_token
        fixed: dict[str, Any] = {"dtype": dtype, "device": "cpu", "num_threads": self.num_threads, "compile": "never"}
        return EngineConfig(**{**fixed, **settings, "kv_memory_bytes": kv_bytes})


def _run(engine: Engine, requests: Sequence[Request]) -> MeasuredRun:
    """Plan and answers, timed together."""
    steps: list[StepRecord] = []
    completions: dict[str, Completion] = {}
    completion_seconds: dict[str, float] = {}
    started = time.perf_counter()
    groups = plan_prefix_groups([request.token_ids for request in requests])
    for completion in engine.run_plan(requests, groups, on_step=steps.append):
        completions[completion.request_id] = completion
        if completion.error is None:
            completion_seconds[completion.request_id] = time.perf_counter() - started
    return MeasuredRun(
        seconds=time.perf_counter() - started,
        steps=steps,
        completions=completions,
        completion_seconds=completion_seconds,
    )
