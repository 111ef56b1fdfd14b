"""Decode steps by graphs: the same answers from replays that run no Python, and what no graph covers runs without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.interpreting import INTERPRETING

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_replayed_steps_answer_alike(tiny_llama: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.engine.execution.graph_program", str(tiny_llama)],
        cwd=ROOT, env=os.environ | INTERPRETING, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    runs = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [run["attention"] for run in runs] == ["fused", "paged"]
    for run in runs:
        assert len(run["replays"]) >= 2, "only one bucket was captured"
        assert sum(run["replays"]) >= 6
