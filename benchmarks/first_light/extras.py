"""Checks that the engine runs without the packages and the C++ compiler that it does not need on a GPU."""

import os
import subprocess
import sys

import torch

from benchmarks.first_light.stage_run import StageRun

WITHOUT_EXTRAS = """
import sys
for name in ("binpacking", "duckdb", "prefect", "pyarrow", "gguf", "llguidance"):
    sys.modules[name] = None
import torch
from benchmarks.random_model import SHAPES, make_model
from engine import Engine, EngineConfig, Request
device = sys.argv[1]
model = make_model(SHAPES["tiny"], device, torch.float32)
attention = "torch" if device == "cpu" else "auto"
engine = Engine.load(model, EngineConfig(device=device, attention=attention, kv_memory_bytes=1 << 22))
answers = engine.generate([Request(request_id="0", token_ids=[5, 6, 7] * 9, max_new_tokens=4, ignore_eos=True)])
print([list(answer.token_ids) for answer in answers])
"""
"""Runs the engine in a process without these packages and without a C++ compiler."""


def run(stage: StageRun) -> None:
    stage.measure("engine without extras", lambda: _without_extras(stage.run.device))


def _without_extras(device: torch.device) -> str:
    environment = os.environ | {"CXX": "no-compiler"}  # the C compiler stays, since Triton needs it for launchers
    command = [sys.executable, "-c", WITHOUT_EXTRAS, device.type]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode:
        raise RuntimeError(f"the engine needs more than it says: {(done.stderr.strip().splitlines() or [''])[-1]}")
    return done.stdout.strip()
