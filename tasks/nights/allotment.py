"""Divides the time before a deadline among all workloads of a night, before the first one runs."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from tasks.storage.plan_file import PlanSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """A partition of a step's plan, with the highest priority of its rows and its forecast in seconds."""

    step: str
    priority: int
    num_rows: int
    seconds: float

    @property
    def cost_class(self) -> int:
        """The class of its seconds per row, on a logarithmic scale with four classes for each factor of two."""
        return math.floor(4 * math.log2(max(1e-9, self.seconds / self.num_rows)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Allotment:
    """A step's share of the night: the seconds for its rows, and for loading its model if no row chosen earlier needs
    that model; the rows that should be done, and those left for the next night."""

    seconds: float = 0.0
    num_rows: int = 0
    num_left: int = 0


def list_portions(step: str, plan: PlanSummary, seconds: float) -> list[Portion]:
    """The partitions of the plan of a step, with its forecast seconds divided by cost. See `Portion`."""
    total = sum(plan.partition_costs)
    partitions = zip(plan.partition_priorities, plan.partition_rows, plan.partition_costs, strict=True)
    return [
        Portion(step=step, priority=priority, num_rows=num_rows, seconds=seconds * cost / total)
        for priority, num_rows, cost in partitions
    ]


def allot(
    portions: Iterable[Portion], models: Mapping[str, str], load_seconds: Mapping[str, float], seconds_left: float
) -> dict[str, Allotment]:
    """Give the night's time to portions by priority, and within a priority to those with the lowest cost per row.
    Returns an allotment for each step with portions, by name.

    Costs per row within a fifth of each other count as equal, as in `engine.planning.cheapest_first`; among equals the
    order of `portions` decides. The first portion of a model also takes the time to load the model; it is left out if
    there is no time for that. The last portion may get less time than it takes: then only a part of its rows is done.

    Args:
        models, load_seconds: step name to model, and model to seconds.
        seconds_left: until the deadline.
    """
    given: dict[str, Allotment] = {}
    loaded: set[str] = set()
    for portion in sorted(portions, key=lambda each: (-each.priority, each.cost_class)):
        before, model = given.get(portion.step, Allotment()), models[portion.step]
        loading = 0.0 if model in loaded else load_seconds[model]
        share = 0.0
        if seconds_left > loading:
            share = min(1.0, (seconds_left - loading) / portion.seconds) if portion.seconds > 0 else 1.0
            loaded.add(model)
        seconds = loading + share * portion.seconds if share else 0.0
        seconds_left -= seconds
        num_rows = int(share * portion.num_rows)
        given[portion.step] = Allotment(
            seconds=before.seconds + seconds,
            num_rows=before.num_rows + num_rows,
            num_left=before.num_left + portion.num_rows - num_rows,
        )
    return given


def begin_wave(steps: Collection[str], kept: dict[str, float], deadline: float) -> float:
    """The Unix time at which a wave must end, so that later steps get the time that is reserved for them.

    Args:
        steps: of the wave; they are removed from `kept`, the reserved seconds of each step that has not begun.
        deadline: of the night, Unix time.
    """
    for name in steps:
        kept.pop(name, None)
    return deadline - sum(kept.values())
