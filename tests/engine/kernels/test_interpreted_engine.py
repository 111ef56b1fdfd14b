"""The engine end to end through the fused Triton kernel, interpreted: the same answers as the CPU's own path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import random, sys
from engine import Engine, EngineConfig, Request

rng = random.Random(1)
documents = [[rng.randrange(3, 500) for _ in range(length)] for length in (20, 37)]
prompts = [[5, 6, 7] * 6 + document + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 20))]
           for document in documents for _ in range(3)] + [[9] * 3]
labels = ((5,), (6, 7))

def answers(attention):
    engine = Engine.load(sys.argv[1], EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 22,
                                                   max_num_batched_tokens=64, block_size=16, attention=attention))
    generated = engine.generate([Request(request_id=str(i), token_ids=p, max_new_tokens=4)
                                 for i, p in enumerate(prompts)])
    scored = engine.score([Request(request_id=str(i), token_ids=p, mode="score", labels=labels)
                           for i, p in enumerate(prompts[:2])])
    return [tuple(a.token_ids) for a in generated], [round(a.label_logprobs[0], 4) for a in scored]

expected, interpreted = answers("torch"), answers(sys.argv[2])
assert interpreted == expected, (interpreted, expected)
print("same answers for", len(prompts), "prompts")
"""


@pytest.mark.slow
def test_the_fused_kernel_gives_the_same_answers(tiny_llama: Path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tiny_llama), "fused"],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "same answers for 7 prompts" in ended.stdout
