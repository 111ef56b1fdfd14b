"""Measures the grid's worst cases again in another process, if time is left."""

import torch

from benchmarks.first_light.attention import measured_cases, wanted_cases
from benchmarks.first_light.stage_run import StageRun
from benchmarks.first_light.tuning import tuned_launches
from benchmarks.kernels.attention import measure
from benchmarks.kernels.attention_step import TINY_CASE
from benchmarks.kernels.gpu import Ceilings

NUM_AGAIN = 12


def run(stage: StageRun) -> None:
    """The cases in which fused gains least over paged or relay, with their first times."""
    torch.manual_seed(1)
    found = measured_cases(stage)
    reached = Ceilings(**stage.found_by("attention")["ceilings"])
    cases = {case.name: case for case in ((TINY_CASE,) if stage.is_tiny else wanted_cases())}
    worst = sorted(found, key=lambda name: min(found[name]["speedup_of_fused"][other] for other in ("paged", "relay")))
    with tuned_launches(stage):
        for name in worst[:NUM_AGAIN]:
            stage.measure(
                name,
                lambda name=name: {
                    "before": found[name]["us"],
                    "now": measure(cases[name], stage.run.device, reached),
                },
            )
