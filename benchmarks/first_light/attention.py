"""BatchLLM's Fig. 8 grid, and long decodes without shared prefixes, with the tuned launches; without FlexAttention."""

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.first_light.stage_run import StageRun
from benchmarks.first_light.tuning import tuned_launches
from benchmarks.kernels.attention import measure, summary
from benchmarks.kernels.attention_step import TINY_CASE, Case, grid
from benchmarks.kernels.gpu import Ceilings, measure_ceilings


def run(stage: StageRun) -> None:
    torch.manual_seed(0)
    reached = stage.measure("ceilings", lambda: measure_ceilings(stage.run, is_tiny=stage.is_tiny))
    if reached is None:
        return
    with tuned_launches(stage):
        for case in (TINY_CASE,) if stage.is_tiny else wanted_cases():
            stage.measure(case.name, lambda case=case: _measure(case, stage.run.device, Ceilings(**reached)))
    print(summary(list(measured_cases(stage).values())))


def _measure(case: Case, device: torch.device, ceilings: Ceilings) -> dict[str, Any]:
    torch.cuda.empty_cache()  # of the case before
    return measure(case, device, ceilings)


def measured_cases(stage: StageRun) -> dict[str, Any]:
    """By case, the figures of the stage attention.

    Raises:
        SystemExit: there are none.
    """
    found = stage.found_by("attention")
    found.pop("ceilings", None)
    if not found:
        raise SystemExit(
            f"benchmarks.first_light: the stage attention has measured no case in {stage.folder} "
            "with this device, versions and commit"
        )
    return found


def wanted_cases() -> Iterator[Case]:
    """Long decodes without shared prefixes, then the grid: first an evenly spread third of it, then the rest."""
    for num_decode in (32, 128):
        yield Case(
            model="Llama-3-8B", prefix_len=4096, own_len=2048, num_members=1, num_decode=num_decode, num_prefill=0,
            prefill_rows=256,
        )  # fmt: skip
    cases = list(grid())
    for first in range(5):
        yield from cases[first::5]
