"""Whole batches in the shape of an 8B model: ourselves, ourselves with a server's policies, transformers; profiles."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_light.answers import graph_figures
from benchmarks.first_light.environment import fp8_tflops
from benchmarks.first_light.profile import profiled
from benchmarks.first_light.stage_run import StageRun
from benchmarks.first_light.tuning import tuned_launches
from benchmarks.kernels.gpu import measure_ceilings
from benchmarks.measuring.batch import Batch
from benchmarks.measuring.timed_runs import Ceilings, Timed, figures, measure_batch
from benchmarks.measuring.workloads import MICRO_DEGREES, MICRO_LENGTHS, Sizes, make_batches
from benchmarks.peers.batchloom_engine import BatchloomEngine
from benchmarks.peers.process import PeerError, require_all_answers
from benchmarks.peers.protocol import Answers, LoadSettings, Work, memory, reset_peak_memory
from benchmarks.peers.transformers_engine import ContinuousEngine
from benchmarks.random_model import SHAPES, make_model, model_config
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.model_shape import ModelShape

SERVER = {"sharing": "lru", "max_running_requests": 256, "attention": "paged", "order": "fcfs"}
"""An inference server's policies: a block cache, at most 256 requests, paged attention, first come first served."""

ROUNDS = {"ours": (2, 1), "ours in fp8": (2, 1), "server": (2, 1), "transformers": (0, 1)}
"""By engine, warm-up and measured runs, of which two differed by 0.3 % at most. Ours compiles kernels in the first one
and captures graphs in the second; transformers, whose runs are the longest, is warmed up by a few short answers."""

OTHER_ROUNDS = (1, 1)
"""Of a workload of `OTHERS`: its kernels are compiled, and its first run captures all graphs but those of a few steps,
at 25 ms each."""

LEAST_SECONDS = {"transformers": 20.0, "server": 60.0}
"""By engine, what a stage must have left for one of its parts to begin. The longest took 45 and 85 s on an H200, of
which the last 25 are there for any part."""

KV_TOKENS = 32_768
"""A fifth of the batch, since a night is many times what the device holds. With four times as much memory, a server's
cache kept all prefixes of such a batch."""

MAIN = ("prefill", "case-1", "case-2")

SHORT = {"case-1-short": ("case-1", 8), "case-2-short": ("case-2", 4)}
"""The cases for transformers, with fewer groups, since it took 136 s on an H200 where batchloom took 5 s."""

GROUPED = "case-1-grouped"
"""Case 1 with the rows of a document side by side, of which a server's cache finds more; ours sorts them itself."""

WORKLOADS = {"ours": (*MAIN, *SHORT), "server": (*MAIN[1:], GROUPED), "transformers": (*SHORT, "prefill")}
"""By engine, what it computes before the others; rows are shuffled but for `GROUPED`."""

OTHERS = (
    "control",
    *(f"micro-{prefix}-{own}-{degree}" for degree in reversed(MICRO_DEGREES) for prefix, own in MICRO_LENGTHS),
)


class Lab:
    """The model, the workloads and the engines of one stage; one engine at a time is on the device."""

    def __init__(self, stage: StageRun) -> None:
        self.is_tiny = stage.is_tiny
        self._device = stage.run.device
        self._shape = SHAPES["tiny" if stage.is_tiny else "llama-3-8b"]
        self._dtype = "float32" if stage.is_tiny else "bfloat16"
        config = model_config(self._shape)
        self.model_shape = ModelShape.from_config(config, dtype=self._dtype)
        self.fp8_shape = ModelShape.from_config(config, dtype="fp8")
        scale, num_tokens, self._kv_tokens = (0.005, 10, 256) if stage.is_tiny else (1.0, 160_000, KV_TOKENS)
        sizes = Sizes(
            scale=scale, num_tokens=num_tokens, kv_tokens=0 if not stage.is_tiny else 16,
            vocab_size=self._shape["vocab_size"],
        )  # fmt: skip
        names = [*MAIN[1:], *OTHERS]
        made = make_batches(names, sizes, tokenizer=Path("unused"), squad=None, ranking=None)
        self.batches = {batch.name: batch for batch in made}
        control = self.batches["control"]
        shape = f"{control.shape.rpartition(',')[0]}, 1 new token"
        self.batches["prefill"] = replace(control, name="prefill", shape=shape, num_output_tokens=1)
        for name, (case, num_groups) in SHORT.items():
            short = self.batches[case].first(num_groups, len(self.batches[case].groups[0].own))
            self.batches[name] = replace(short, name=name, shape=f"the first {num_groups} groups of {case}")
        case_1 = self.batches["case-1"]
        self.batches[GROUPED] = replace(case_1, name=GROUPED, shape=f"{case_1.shape}, rows grouped")
        self._max_tokens = 64 if stage.is_tiny else 8192

    def ours(self, **policies: Any) -> BatchloomEngine:
        config = {"attention": "fused", "device": str(self._device), "dtype": self._dtype, "block_size": 16}
        config |= {
            "max_num_batched_tokens": self._max_tokens,
            "kv_memory_bytes": self._kv_tokens * self.model_shape.kv_bytes_per_token,
        }
        return BatchloomEngine.around(Engine.load(self._model(), EngineConfig(**(config | policies))))

    def transformers(self) -> ContinuousEngine:
        settings = LoadSettings(
            model="", dtype=self._dtype, device=str(self._device), kv_tokens=self._kv_tokens, kv_bytes=0,
            max_num_batched_tokens=self._max_tokens, max_model_len=0, num_threads=0, scratch="",
        )  # fmt: skip
        engine = ContinuousEngine.around(self._model(), settings)
        few = replace(self.batches["prefill"].first(4, 1), num_output_tokens=8)  # with decode steps
        engine.run(few.work("shuffled", round_number=0))
        return engine

    def _model(self) -> Any:
        return make_model(self._shape, self._device, getattr(torch, self._dtype))


class InProcess:
    """Wraps an engine of this process, so that `measure_batch` can use it like one of another process."""

    def __init__(self, engine: BatchloomEngine | ContinuousEngine) -> None:
        self._engine = engine

    def run(self, work: Work, _: float) -> tuple[Answers, dict[str, int]]:
        reset_peak_memory()
        answers = self._engine.run(work)
        require_all_answers(type(self._engine).__name__, work, answers)
        return answers, memory()


def run(stage: StageRun) -> None:
    lab = Lab(stage)
    reached = stage.measure("ceilings", lambda: measure_ceilings(stage.run, is_tiny=stage.is_tiny))
    if reached is None:
        return
    ceilings = Ceilings(
        device=stage.run.hardware, matrix_flops_per_second=reached["matrix_tflops"] * 1e12,
        copy_bytes_per_second=reached["memory_gb_s"] * 1e9, by_product={},
    )  # fmt: skip
    engines: dict[str, Callable[[], Any]] = {
        "ours": lab.ours,
        "transformers": lab.transformers,
        "server": partial(lab.ours, **SERVER),
    }
    with tuned_launches(stage) as is_tuned:
        stage.measure("has tuned launches", lambda: is_tuned)
        for name, load in engines.items():
            _measure_engine(stage, lab, name, load, WORKLOADS[name], ceilings)
            _free_memory()
            if name == "ours":
                _measure_fp8(stage, lab, ceilings)
                _free_memory()
        pair = {name: cache(engines[name]) for name in ("ours", "server")}
        for workload in () if stage.is_tiny else OTHERS:
            for name, engine in pair.items():
                _measure(stage, lab, name, engine, workload, ceilings)


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _measure_fp8(stage: StageRun, lab: Lab, ceilings: Ceilings) -> None:
    """Only prefill, with products and KV in 8 bits, if the device has them; shares are of the rate of such products."""
    rate = stage.measure("fp8 matrix rate", lambda: fp8_tflops(stage))
    if isinstance(rate, float):
        ceilings = replace(ceilings, matrix_flops_per_second=rate * 1e12)
        _measure_engine(stage, lab, "ours in fp8", partial(lab.ours, dtype="fp8"), MAIN[:1], ceilings)


def _measure_engine(
    stage: StageRun, lab: Lab, name: str, load: Callable[[], Any], names: tuple[str, ...], ceilings: Ceilings
) -> None:
    """All workloads with one engine, loaded when it is first needed, and profiles of ours behind the first ones."""
    engine = cache(load)
    for workload in names[:1] if lab.is_tiny else names:
        _measure(stage, lab, name, engine, workload, ceilings)
    if names[0] == MAIN[0]:
        for kind, batch in _profiles(lab, name):
            num_warm_up = 0 if lab.is_tiny or kind in names else 2
            stage.measure(f"profile: {kind}", lambda b=batch, n=num_warm_up: _profile(engine(), b, n))


def _measure(
    stage: StageRun, lab: Lab, name: str, engine: Callable[[], Any], workload: str, ceilings: Ceilings
) -> None:
    batch = lab.batches[workload]
    rounds = (0, 1) if lab.is_tiny else OTHER_ROUNDS if workload in OTHERS else ROUNDS[name]
    shape = lab.fp8_shape if name == "ours in fp8" else lab.model_shape
    stage.measure(
        f"{name}: {workload}", lambda: _timed(engine(), batch, rounds, shape, ceilings), LEAST_SECONDS.get(name, 0.0)
    )


def _timed(engine: Any, batch: Batch, rounds: tuple[int, int], shape: ModelShape, ceilings: Ceilings) -> dict[str, Any]:
    """Figures of an engine's measured runs.

    Args:
        rounds: numbers of warm-up and measured rounds.
    """
    order = "grouped" if batch.name == GROUPED else "shuffled"
    found = measure_batch(
        {"engine": InProcess(engine)},  # type: ignore[dict-item]
        batch, order, num_unmeasured=rounds[0], num_repeats=rounds[1], run_seconds=0.0,
    )["engine"]  # fmt: skip
    if not isinstance(found, Timed):
        raise PeerError(found)
    graphs = {"graphs": graph_figures(engine._engine)} if isinstance(engine, BatchloomEngine) else {}
    return {"shape": batch.shape} | figures(found, batch, shape, ceilings) | graphs


def _profiles(lab: Lab, name: str) -> Iterator[tuple[str, Batch]]:
    """Workloads of prefill steps only and, of ours in bf16, of almost only decode steps, and of both as in a night."""
    few = lab.batches["control"].first(2 if lab.is_tiny else 16, 1)
    yield name.replace("ours", "prefill"), replace(few, num_output_tokens=1)
    if name != "ours":
        return
    short = replace(
        lab.batches["case-1"].first(2 if lab.is_tiny else 40, 7), num_output_tokens=2 if lab.is_tiny else 32
    )
    groups = [replace(group, prefix=group.prefix[:64], own=[own[:8] for own in group.own]) for group in short.groups]
    yield "decode", replace(short, groups=groups)
    yield "case-1", lab.batches["case-1"]


def _profile(engine: BatchloomEngine, batch: Batch, num_warm_up: int) -> dict[str, Any]:
    """A run in which everything is compiled and captured, after so many others."""
    for number in range(num_warm_up):
        engine.run(batch.work("shuffled", round_number=11 + number))
    work = batch.work("shuffled", round_number=13)
    found, answers = profiled(lambda: engine.run(work))
    num_steps = answers.details["num_steps"]
    return found | {"num_steps": num_steps, "step_ms": round(1000 * answers.seconds / num_steps, 3)}
