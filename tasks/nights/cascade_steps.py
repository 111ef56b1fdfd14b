"""Adds cascades to a night's graph: a later step answers the rows of which the first model is unsure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from engine.errors import ConfigError
from tasks.cascades.cascade import Cascade, find_probability_columns
from tasks.cascades.row_choice import Role
from tasks.nights.graph import NightStep
from tasks.workloads.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeStep:
    """The place of a step in its cascade: the step that answers every row, which rows this step answers, and the model
    that answers every row, by its name in the night."""

    workload: str
    role: Role
    model: str
    cascade: Cascade


def add_cascades(
    steps: Sequence[NightStep], workloads: Mapping[str, Workload], cascades: Mapping[str, Cascade]
) -> tuple[tuple[NightStep, ...], dict[str, Workload], dict[str, CascadeStep]]:
    """The graph with one more step after each workload with a cascade, or two if a sample chooses the threshold. Steps
    that come after such a workload come after its last step.

    Args:
        steps: of the workloads, in the order of the file.
        workloads, cascades: by step name.
    Returns:
        all steps, their workloads by step name, and the cascade steps by step name.
    Raises:
        ConfigError: answers have no probability, or the cascade leads to the workload's own model.
    """
    added, found, roles = list[NightStep](), dict(workloads), dict[str, CascadeStep]()
    last: dict[str, str] = {}
    for step in steps:
        added.append(step)
        cascade = cascades.get(step.name)
        if cascade is None:
            continue
        if cascade.to == step.model:
            raise ConfigError(f"workload {step.name!r}: the cascade leads to {cascade.to!r}, the workload's own model")
        find_probability_columns(workloads[step.name])
        last[step.name] = second = f"{step.name}-{re.sub('[^A-Za-z0-9_]+', '-', cascade.to).strip('-')}"
        sample: dict[str, Role] = {f"{second}-sample": "sample"} if cascade.num_sampled else {}
        chain: dict[str, Role] = {step.name: "first", **sample, second: "unsure"}
        for name, role in chain.items():
            roles[name] = CascadeStep(workload=step.name, role=role, model=step.model, cascade=cascade)
        for before, name in pairwise(chain):
            if name in found:
                raise ConfigError(f"workload {step.name!r}: a step of its cascade is called {name!r}, as a workload")
            added.append(NightStep(name=name, model=cascade.to, after=(before,)))
            found[name] = replace(workloads[step.name], name=name, adapter=None)
    is_added = roles.keys() - last.keys()
    ordered = (
        step if step.name in is_added else replace(step, after=tuple(last.get(name, name) for name in step.after))
        for step in added
    )
    return tuple(ordered), found, roles
