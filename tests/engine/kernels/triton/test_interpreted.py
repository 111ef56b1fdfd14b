"""Every attention kernel, run by Triton's interpreter, against float64 torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.kernels.triton.cases import CASES
from tests.engine.kernels.triton.program import SPECIAL
from tests.interpreting import INTERPRETING

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def results() -> dict[str, dict]:
    """What the interpreter found, by case. One process: the environment decides at import whether Triton interprets."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.engine.kernels.triton.program"],
        cwd=ROOT, env=os.environ | INTERPRETING, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    return {line["case"]: line for line in map(json.loads, run.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(case.name for case in CASES), *SPECIAL])
def test_equals_the_reference(results: dict[str, dict], name: str) -> None:
    assert results[name]["problems"] == []


def test_without_interpreter_or_gpu_it_says_what_is_needed() -> None:
    program = (
        "import torch; from engine.kernels.triton.triton_attention import TritonAttention; "
        "TritonAttention(num_q_heads=1, num_kv_heads=1, "
        "head_dim=64, dtype=torch.float32, block_size=16, device=torch.device('cpu'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        "ValueError: device cpu has no Triton; a GPU, or TRITON_INTERPRET=1 in the environment, is needed"
    )
