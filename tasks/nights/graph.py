"""The steps of a night as a graph, their order with the fewest model changes, and which are planned together."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Literal

from engine.errors import ConfigError
from tasks.workloads.workload import Workload

Outcome = Literal["done", "failed", "skipped", "left"]
"""How a step ended. Skipped: an earlier step failed or was skipped. Left: not finished before the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NightStep:
    """A workload of the night, the model that answers it, and the steps whose answers it reads, all by name."""

    name: str
    model: str
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wave:
    """Steps of one model that do not depend on each other."""

    model: str
    steps: tuple[str, ...]


def chain_steps(workloads: Sequence[Workload]) -> tuple[tuple[NightStep, ...], dict[str, Workload]]:
    """Steps without a model, each of which may read the answers of those before it, and step name to workload."""
    names = [str(number) for number in range(len(workloads))]
    befores = [(), *((name,) for name in names)]
    steps = tuple(NightStep(name=name, model="", after=after) for name, after in zip(names, befores, strict=False))
    return steps, dict(zip(names, workloads, strict=True))


def check_graph(steps: Sequence[NightStep]) -> None:
    """Raise `ConfigError` if a name is used twice or unknown, or if steps wait for each other."""
    names = [step.name for step in steps]
    for step in steps:
        if names.count(step.name) > 1:
            raise ConfigError(f"workload {step.name!r} is there {names.count(step.name)} times")
        for name in step.after:
            if name not in names:
                raise ConfigError(f"workload {step.name!r} comes after {name!r}, which is none of {', '.join(names)}")
    try:
        TopologicalSorter({step.name: step.after for step in steps}).prepare()
    except CycleError as error:
        cycle = reversed(error.args[1])  # each before the next one
        raise ConfigError(f"workloads wait for each other: {' after '.join(cycle)}") from error


def plan_waves(steps: Sequence[NightStep]) -> list[Wave]:
    """All steps in waves, each step after those that it reads, with the fewest possible model changes. A loaded model
    runs all steps that are or become ready. The next model is found by a breadth-first search over sets of finished
    steps; among equals, models that come first in `steps` go first."""
    visited: set[frozenset[str]] = {frozenset()}
    level: list[tuple[frozenset[str], list[Wave]]] = [(frozenset(), [])]
    while level:
        following = []
        for done, waves in level:
            if len(done) == len(steps):
                return waves
            for model in dict.fromkeys(step.model for step in _list_ready(steps, done)):
                now_done, now_waves = _run_model(steps, done, model)
                if now_done not in visited:
                    visited.add(now_done)
                    following.append((now_done, waves + now_waves))
        level = following
    raise AssertionError("steps wait for each other")


def _list_ready(steps: Iterable[NightStep], done: Collection[str]) -> list[NightStep]:
    return [step for step in steps if step.name not in done and all(name in done for name in step.after)]


def _run_model(steps: Sequence[NightStep], done: frozenset[str], model: str) -> tuple[frozenset[str], list[Wave]]:
    """The finished steps, and the waves, after the model has run all steps that are ready or become so."""
    waves = []
    while ready := [step.name for step in _list_ready(steps, done) if step.model == model]:
        waves.append(Wave(model=model, steps=tuple(ready)))
        done = done.union(ready)
    return done, waves


def run_waves(
    steps: Sequence[NightStep], answer: Callable[[Wave], Mapping[str, Outcome]], has_time: Callable[[], bool]
) -> dict[str, Outcome]:
    """Run the waves of a night in order; steps that do not depend on a failed step are run. Returns step name to
    outcome.

    Args:
        steps: a graph that `check_graph` accepts.
        answer: runs a wave and returns the outcome of each of its steps.
        has_time: whether another wave may begin.
    """
    outcomes: dict[str, Outcome] = {}
    after = {step.name: step.after for step in steps}
    for wave in plan_waves(steps):
        ready = []
        for name in wave.steps:
            before = {outcomes[other] for other in after[name]}
            if before & {"failed", "skipped"}:
                outcomes[name] = "skipped"
            elif "left" in before or not has_time():
                outcomes[name] = "left"
            else:
                ready.append(name)
        if ready:
            outcomes |= answer(Wave(model=wave.model, steps=tuple(ready)))
    return outcomes


def list_batches(workloads: Sequence[Workload], *, is_joint: bool) -> list[list[Workload]]:
    """Workloads of one model that do not read each other's answers, in batches that are planned together. A batch has
    one adapter. Pooled workloads, which share nothing, are batches of their own, and so are all if not `is_joint`, as
    with an exchange, which carries the work of one workload."""
    batches: list[list[Workload]] = []
    for adapter in dict.fromkeys(workload.adapter for workload in workloads):
        alike = [workload for workload in workloads if workload.adapter == adapter]
        joint = [workload for workload in alike if is_joint and not workload.kind.is_pooled]
        batches += [joint] if joint else []
        batches += [[workload] for workload in alike if workload not in joint]
    return batches
