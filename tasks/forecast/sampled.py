"""Forecasts the time and tokens of a whole workload from an answered sample of its rows, with error bars."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.forecast.hardware import choose_hardware
from tasks.forecast.prediction import predict_run
from tasks.runs.infer_job import InferJob
from tasks.storage.artifact import ArtifactRef
from tasks.storage.plan_file import read_plan_summary
from tasks.workers.engine_team import EngineTeam
from tasks.workloads.workload import Workload

FEWEST_FREE = 3
"""Fewest degrees of freedom from which a scatter is estimated: values less the numbers that were fitted to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A quantity and its 95% interval; the ends are None if the sample is too small for an interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def map(self, change: Callable[[float], float]) -> "Estimate":
        """The estimate of a quantity that rises with this one."""
        low, high = (None if end is None else change(end) for end in (self.low, self.high))
        return Estimate(value=change(self.value), low=low, high=high)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledForecast:
    """The forecast for answering all rows.

    Attributes:
        num_rows: all rows, from which the sample was chosen.
        seconds: of inference: simulated with the sample's answer length, times `speed_ratio`.
        speed_ratio: real over simulated time of the sample's steps.
        peak_kv_bytes: the most KV that a step uses, of `kv_budget_bytes`, on each engine.
    """

    num_rows: int
    seconds: Estimate
    answer_tokens: Estimate
    num_prompt_tokens: int
    num_output_tokens: Estimate
    speed_ratio: Estimate
    weight_bytes: int
    peak_kv_bytes: Estimate
    kv_budget_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredSample:
    """A sample that was answered: the job that answered it, the output tokens of each answer by member of the job, and
    the step records."""

    job: InferJob
    output_tokens: Sequence[Sequence[int]]
    steps: Sequence[ArtifactRef]


@task(name="forecast", retries=0, cache_policy=NO_CACHE, persist_result=False)
def forecast_whole(
    plan: ArtifactRef, workload: Workload, output_tokens: Sequence[int], sample: AnsweredSample, team: EngineTeam
) -> SampledForecast:
    """Simulate all rows with the sample's answer length, and correct the time by the sample's real step times.

    The intervals cover the chance in the sample: lengths of its answers and times of its steps. They do not cover the
    error of simulating many rows instead of few.

    Args:
        plan, workload: of all rows, and what they ask.
        output_tokens: of each answer in the sample.
    Raises:
        ArtifactError: a plan is not what its reference says.
        CapacityError, ConfigError, ModelError: the device cannot hold the model, or their cost is not known.
    """
    hardware = choose_hardware(Path(sample.job.checkpoint), team)
    whole = read_plan_summary(plan)
    length = mean_of(np.array(output_tokens, dtype=float), whole.num_rows, workload.kind.max_answer_tokens)

    def simulate(job: InferJob, *means: float) -> dict[str, float]:
        pairs = zip(job.members, means, strict=True)
        members = tuple(replace(member, expected_output_tokens=max(1, round(mean))) for member, mean in pairs)
        return predict_run.fn(replace(job, members=members), read_plan_summary(job.plan), team, hardware=hardware)

    means = (sum(lengths) / max(1, len(lengths)) for lengths in sample.output_tokens)
    simulated = simulate(sample.job, *means)
    ratio = _compare_speed(sample.steps, simulated["step_seconds"])
    all_rows = replace(sample.job.first, workload=workload, first_row_id=0)
    of_all = cache(partial(simulate, replace(sample.job, plan=plan, members=(all_rows,))))
    block_bytes = hardware.shape.kv_block_bytes(team.engine)
    return SampledForecast(
        num_rows=whole.num_rows,
        seconds=_multiply(length.map(lambda num_tokens: of_all(num_tokens)["elapsed_seconds"]), ratio),
        answer_tokens=length,
        num_prompt_tokens=whole.sharing.num_processed_tokens,
        num_output_tokens=length.map(lambda num_tokens: num_tokens * whole.num_rows),
        speed_ratio=ratio,
        weight_bytes=hardware.shape.weight_bytes,
        peak_kv_bytes=length.map(lambda num_tokens: of_all(num_tokens)["peak_kv_blocks"] * block_bytes),
        kv_budget_bytes=hardware.kv_bytes(team.engine),
    )


def mean_of(values: npt.NDArray[np.float64], num_all: int, most: int) -> Estimate:
    """The mean of a population of num_all from a sample without replacement; no interval from fewer than four values,
    and none from all.

    Args:
        most: the largest possible value, at least 1.
    """
    if not len(values):
        return Estimate(value=float(most))
    mean = float(values.mean())
    if len(values) == num_all:
        return Estimate(value=mean, low=mean, high=mean)
    if len(values) <= FEWEST_FREE:
        return Estimate(value=mean)
    error = (
        student_95(len(values) - 1) * float(values.std(ddof=1)) * math.sqrt((1 - len(values) / num_all) / len(values))
    )
    return Estimate(value=mean, low=max(min(1.0, mean), mean - error), high=min(float(most), mean + error))


def student_95(num_free: int) -> float:
    """The 0.975 quantile of Student's t with num_free degrees of freedom, at least 3; within 1 % (the series of Fisher
    and Cornish, Technometrics 1960, around the normal quantile)."""
    return 1.96 + 2.372 / num_free + 2.823 / num_free**2 + 2.556 / num_free**3


def _compare_speed(steps: Sequence[ArtifactRef], simulated_seconds: float) -> Estimate:
    """Real over simulated time of the sample's steps; the error is their scatter around a line in their tokens."""
    names = ["duration_ms", "num_decode_tokens", "num_suffix_tokens", "num_prefix_tokens"]
    tables = [pq.read_table(part.path, columns=names) for part in steps]
    columns = {name: np.concatenate([table.column(name).to_numpy() for table in tables]) for name in names}
    seconds = columns.pop("duration_ms") / 1000
    ratio = float(seconds.sum()) / simulated_seconds
    if len(seconds) < FEWEST_FREE + 2:
        return Estimate(value=ratio)
    line = np.stack([np.ones(len(seconds)), sum(columns.values())], axis=1)
    residuals = seconds - line @ np.linalg.lstsq(line, seconds)[0]
    scatter = math.sqrt(float((residuals**2).sum()) / (len(seconds) - 2) * len(seconds))
    error = student_95(len(seconds) - 2) * scatter / simulated_seconds
    return Estimate(value=ratio, low=max(0.0, ratio - error), high=ratio + error)


def _multiply(one: Estimate, other: Estimate) -> Estimate:
    """The product of two independent estimates: the squares of their relative errors add up."""
    value = one.value * other.value
    if None in (one.low, one.high, other.low, other.high) or not value:
        return Estimate(value=value)
    low, high = (
        math.hypot(*((getattr(each, end) - each.value) / each.value for each in (one, other)))
        for end in ("low", "high")
    )
    return Estimate(value=value, low=max(0.0, value * (1 - low)), high=value * (1 + high))
