"""Tunes launches and costs for 8B models, and measures the error of the cost model."""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.first_light.stage_run import StageRun
from benchmarks.kernels import tune
from benchmarks.kernels.attention_batches import GroupSize
from benchmarks.kernels.cost_fit import cost_errors
from benchmarks.kernels.tuning_steps import TuningBench, TuningStep
from engine.kernels.triton import tuned
from engine.kernels.triton.triton_attention import architecture_of

SIZES = ((16, 128), (32, 128), (16, 64))
"""Element bits and head dim; bf16 Llama and Qwen2 of 8B come first. Each gets half of the time left; launches are not
searched where this device with these versions has measured the shipped ones."""

TINY_STEPS = (
    TuningStep(groups=[GroupSize(prefix_len=0, members=[(5, 1)])]),
    TuningStep(groups=[GroupSize(prefix_len=16, members=[(3, 1), (2, 1)])], has_prefix_tiles=True),
)


def run(stage: StageRun) -> None:
    architecture = architecture_of(stage.run.device)
    for index, (bits, head_dim) in enumerate(SIZES[:1] if stage.is_tiny else SIZES):
        is_last = index == len(SIZES) - 1
        seconds = stage.seconds_left / (1 if is_last else 2)
        shipped = tuned.load_tuned(architecture, element_bits=bits, head_dim=head_dim)
        if not (stage.is_tiny or tune.measured_on(stage.run) in shipped.origin):
            stage.measure(
                f"launches, {bits}-bit {head_dim}", lambda b=bits, h=head_dim, s=seconds: _tune(stage, b, h, s)
            )
        with tuned_launches(stage):
            stage.measure(
                f"cost model, {bits}-bit {head_dim}", lambda b=bits, h=head_dim: _cost_errors(stage, architecture, b, h)
            )


def _tune(stage: StageRun, bits: int, head_dim: int, seconds: float) -> dict[str, Any]:
    """The architecture's new entry, and the candidates that failed.

    Raises:
        RuntimeError: no entry was found.
    """
    with tempfile.TemporaryDirectory() as folder:
        architecture = architecture_of(stage.run.device)
        problems = tune.measure([(bits, head_dim)], stage.run, Path(folder), seconds)
        file = Path(folder) / f"{architecture}.json"
        if not file.exists():
            raise RuntimeError(f"no launch was measured: {'; '.join(problems)}")
        (entry,) = json.loads(file.read_text())["entries"]
    return {"architecture": architecture, "entry": entry, "left_out": problems}


def _cost_errors(stage: StageRun, architecture: str, bits: int, head_dim: int) -> dict[str, Any]:
    """By launch: the times of the fit's steps, and the mean and largest relative error of the costs."""
    steps = TINY_STEPS if stage.is_tiny else None
    bench = TuningBench(stage.run, tune.DTYPES[bits], head_dim, steps)
    found = {}
    costs = tuned.load_tuned(architecture, element_bits=bits, head_dim=head_dim)
    for launch in costs.launches:
        measured = bench.measure(launch)
        errors = torch.tensor(cost_errors(costs, launch, measured)).abs()
        found[launch.name] = {
            "mean_error": round(float(errors.mean()), 4),
            "worst_error": round(float(errors.max()), 4),
            "us": [round(step.us, 2) for step in measured],
        }
    return found


@contextmanager
def tuned_launches(stage: StageRun) -> Iterator[bool]:
    """In the block, new attention backends use the launches of the tuning stage; gives whether there are any."""
    entries = [part for name, part in stage.found_by("tuning").items() if name.startswith("launches")]
    before = tuned.CONFIG_FOLDER
    with tempfile.TemporaryDirectory() as configs:
        shutil.copytree(before, configs, dirs_exist_ok=True)
        for found in entries:
            tune.keep(found["entry"], found["architecture"], Path(configs))
        tuned.CONFIG_FOLDER = Path(configs)
        try:
            yield bool(entries)
        finally:
            tuned.CONFIG_FOLDER = before
