"""FlexAttention on a few of the grid's cases, since torch compiles it for each case."""

from dataclasses import asdict
from typing import Any

import torch

from benchmarks.first_light.attention import measured_cases, wanted_cases
from benchmarks.first_light.stage_run import StageRun
from benchmarks.kernels.attention import gated
from benchmarks.kernels.attention_step import TINY_CASE, Case, Step
from benchmarks.kernels.gpu import DeviceTime, device_time

NUM_CASES = 16
"""Cases spread over the grid, in the order of `wanted_cases`."""


def run(stage: StageRun) -> None:
    torch.manual_seed(0)
    fused_us = {name: found["us"]["fused"] for name, found in measured_cases(stage).items()}
    wanted = (TINY_CASE,) if stage.is_tiny else wanted_cases()
    # Where nothing is shared, a block of its queries would see the KV of many requests, so that is not compared.
    cases = [case for case in wanted if case.name in fused_us and case.num_members > 1]
    for case in cases[:NUM_CASES]:
        stage.measure(case.name, lambda case=case: _measure(case, stage.run.device, fused_us[case.name]))
        torch.cuda.empty_cache()


def _measure(case: Case, device: torch.device, fused_us: float) -> dict[str, Any]:
    ((_, found),) = gated(Step.make(case, device), device_time, ("flex",))
    if not isinstance(found, DeviceTime):
        return {"no_time": found}
    return asdict(found) | {"speedup_of_fused": found.us / fused_us}
