"""The engine end to end through the Triton kernels, interpreted, layers included: the same answers as torch's."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interpreting import INTERPRETING

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@pytest.fixture(scope="module")
def answers(tiny_checkpoint: Callable[[str], Path]) -> dict[str, dict[str, Any]]:
    """What engine_program.py finds, by family. One process for all, which imports once."""
    program = ["-W", "error", "-m", "tests.engine.kernels.triton.engine_program"]
    ended = subprocess.run(
        [sys.executable, *program, *(str(tiny_checkpoint(family)) for family in FAMILIES)],
        env=os.environ | INTERPRETING, cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    return dict(zip(FAMILIES, map(json.loads, ended.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_give_the_same_answers(answers: dict[str, dict[str, Any]], family: str) -> None:
    expected, interpreted = answers[family]["torch"], answers[family]["fused"]
    assert (expected["has_replaced_layers"], interpreted["has_replaced_layers"]) == (False, True)
    assert interpreted == expected | {"has_replaced_layers": True}
    assert len(expected["generated"]) == (7 if family == "qwen2" else 3)
    assert len(expected.get("scored", ())) == (2 if family in ("qwen2", "qwen3") else 0)


@pytest.mark.slow
def test_two_ranks_sum_up_what_the_kernels_compute(answers: dict[str, dict[str, Any]]) -> None:
    found = answers["qwen2"]["two ranks"]
    assert found["has_replaced_layers"]
    assert found["generated"] == found["expected"]
    assert found["num_sums"] > 0
    assert found["num_sums"] % 4 == 0


@pytest.mark.slow
def test_fp8_scores_are_near_float32_ones(answers: dict[str, dict[str, Any]]) -> None:
    """Products and KV of a family with norms of the heads; KV memory holds as many blocks as its bytes say."""
    found = answers["qwen3"]["fp8"]
    assert found["has_replaced_layers"]
    # Of 3 mantissa bits in every product; a weight or a scale that is read wrong makes it as large as the scores' own.
    assert 0 < found["error"] < 0.25
    assert found["num_kv_blocks"] == (1 << 20) // found["block_bytes"]
    assert len(found["generated"][0]) == 3
