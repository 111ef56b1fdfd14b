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

PROGRAM = """
import json, random, sys
from engine import Engine, EngineConfig, Request

rng = random.Random(1)
documents = [[rng.randrange(3, 500) for _ in range(length)] for length in (20, 37)]
prompts = [[5, 6, 7] * 6 + document + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 20))]
           for document in documents for _ in range(3)] + [[9] * 3]
labels = ((5,), (6, 7))

def answers(model, attention):
    engine = Engine.load(model, EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 22,
                                             max_num_batched_tokens=64, block_size=16, attention=attention))
    assert engine._model.has_replaced_layers == (attention != "torch")
    generated = engine.generate([Request(request_id=str(i), token_ids=p, max_new_tokens=4)
                                 for i, p in enumerate(prompts)])
    scored = engine.score([Request(request_id=str(i), token_ids=p, mode="score", labels=labels)
                           for i, p in enumerate(prompts[:2])])
    return [tuple(a.token_ids) for a in generated], [round(a.label_logprobs[0], 4) for a in scored]

for model in sys.argv[1:]:
    print(json.dumps([answers(model, "torch"), answers(model, "fused")]))
"""


TWO_RANKS = """
import sys
from pathlib import Path
from engine import Engine, EngineConfig, Request
from tests.engine.tensor_parallel.thread_ranks import two_ranks

requests = [Request(request_id=str(i), token_ids=[5, 6, 7] * 7 + [i] * (i + 1), max_new_tokens=3) for i in range(3)]
settings = dict(dtype="float32", device="cpu", kv_memory_bytes=1 << 22, max_num_batched_tokens=64, block_size=16)
expected = Engine.load(sys.argv[1], EngineConfig(attention="torch", **settings)).generate(requests)
config = EngineConfig(attention="fused", tensor_parallel_size=2, **settings)
with two_ranks(Path(sys.argv[1]), config) as (engine, meeting):
    assert engine._model.has_replaced_layers
    found = engine.generate(requests)
assert [a.token_ids for a in found] == [a.token_ids for a in expected], found
assert meeting.num_sums[0] and meeting.num_sums[0] % 4 == 0
print("same answers of two ranks")
"""


@pytest.mark.slow
def test_two_ranks_sum_up_what_the_kernels_compute(tiny_checkpoint: Callable[[str], Path]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", TWO_RANKS, str(tiny_checkpoint("qwen2"))],
        env=os.environ | INTERPRETING, cwd=Path(__file__).parents[4], capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "same answers of two ranks" in ended.stdout


@pytest.fixture(scope="module")
def answers(tiny_checkpoint: Callable[[str], Path]) -> dict[str, list[Any]]:
    """By family, those of torch and those of the kernels. One process for all, which imports once."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *(str(tiny_checkpoint(family)) for family in FAMILIES)],
        env=os.environ | INTERPRETING, cwd=Path(__file__).parents[4], capture_output=True, text=True, timeout=600,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return dict(zip(FAMILIES, map(json.loads, ended.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_give_the_same_answers(answers: dict[str, list[Any]], family: str) -> None:
    expected, interpreted = answers[family]
    assert [len(part) for part in expected] == [7, 2]
    assert interpreted == expected


@pytest.mark.slow
def test_fp8_scores_are_near_float32_ones(tiny_checkpoint: Callable[[str], Path]) -> None:
    """Products and KV of a family with norms of the heads; KV memory holds as many blocks as its bytes say."""
    program = "tests.engine.kernels.interpreted.fp8_program"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-m", program, str(tiny_checkpoint("qwen3"))],
        env=os.environ | INTERPRETING, cwd=Path(__file__).parents[4], capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "error" in ended.stdout
