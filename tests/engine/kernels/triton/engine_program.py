"""What engines answer through interpreted kernels; test_interpreted_engine.py runs this, with TRITON_INTERPRET=1.

Takes the folders of tiny checkpoints and prints a JSON line for each, by "torch" and "fused", and by what else is asked
of its family: "two ranks" of Qwen2, "fp8" of Qwen3. Qwen2 answers every prompt; what others add shows in a few.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine import Engine, EngineConfig, Request
from tests.engine.tensor_parallel.thread_ranks import two_ranks

RNG = random.Random(1)
DOCUMENTS = [[RNG.randrange(3, 500) for _ in range(length)] for length in (20, 37)]
PROMPTS = [
    [5, 6, 7] * 6 + document + [RNG.randrange(3, 500) for _ in range(RNG.randrange(1, 20))]
    for document in DOCUMENTS
    for _ in range(3)
] + [[9] * 3]
FP8_PROMPTS = [*([*DOCUMENTS[0], *(RNG.randrange(3, 500) for _ in range(length))] for length in (1, 7)), [9] * 3]
FP8_LABELS = tuple((token,) for token in RNG.sample(range(3, 500), 40))
RANK_PROMPTS = [[5, 6, 7] * 7 + [i] * (i + 1) for i in range(3)]


def load(checkpoint: Path, **settings: Any) -> Engine:
    return Engine.load(checkpoint, configure(**settings))


def configure(**settings: Any) -> EngineConfig:
    given = {"dtype": "float32", "device": "cpu", "kv_memory_bytes": 1 << 22, "block_size": 16}
    return EngineConfig(**(given | {"max_num_batched_tokens": 64} | settings))


def generate(engine: Engine, prompts: Sequence[Sequence[int]], num_tokens: int, **settings: Any) -> list[list[int]]:
    asked = [
        Request(request_id=str(i), token_ids=p, max_new_tokens=num_tokens, **settings) for i, p in enumerate(prompts)
    ]
    return [list(answer.token_ids) for answer in engine.generate(asked)]


def answer(checkpoint: Path, family: str, attention: str) -> dict[str, Any]:
    engine = load(checkpoint, attention=attention)
    found = {
        "has_replaced_layers": engine._model.has_replaced_layers,
        "generated": generate(engine, *((PROMPTS, 4) if family == "qwen2" else (PROMPTS[-3:], 2))),
    }
    if family in ("qwen2", "qwen3"):
        asked = [
            Request(request_id=str(i), token_ids=prompt, mode="score", labels=((5,), (6, 7)))
            for i, prompt in enumerate(PROMPTS[:2])
        ]
        found["scored"] = [round(scored.label_logprobs[0], 4) for scored in engine.score(asked)]
    return found


def answer_by_two_ranks(checkpoint: Path) -> dict[str, Any]:
    expected = generate(load(checkpoint, attention="torch"), RANK_PROMPTS, 3)
    with two_ranks(checkpoint, configure(attention="fused", tensor_parallel_size=2)) as (engine, meeting):
        return {
            "has_replaced_layers": engine._model.has_replaced_layers,
            "generated": generate(engine, RANK_PROMPTS, 3),
            "expected": expected,
            "num_sums": meeting.num_sums[0],
        }


def expected_scores(checkpoint: Path) -> torch.Tensor:
    """Log-probabilities of each label after each prompt, normalised over the labels: ``[prompts, labels]``."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        logits = torch.stack([model(input_ids=torch.tensor([prompt])).logits[0, -1] for prompt in FP8_PROMPTS])
    return logits[:, [label[0] for label in FP8_LABELS]].log_softmax(-1)


def answer_in_fp8(checkpoint: Path) -> dict[str, Any]:
    """The error of scores is a share of the scores' own spread, by transformers in float32."""
    engine = load(checkpoint, dtype="fp8", kv_memory_bytes=1 << 20, max_num_batched_tokens=16)
    asked = [
        Request(request_id=str(i), token_ids=p, mode="score", labels=FP8_LABELS) for i, p in enumerate(FP8_PROMPTS)
    ]
    found = torch.tensor([scored.label_logprobs for scored in engine.score(asked)])
    expected = expected_scores(checkpoint)
    sizes = engine._model.kv_shape
    return {
        "has_replaced_layers": engine._model.has_replaced_layers,
        "error": float((found - expected).square().mean().sqrt() / expected.std()),
        "block_bytes": 16 * sizes.num_layers * 2 * sizes.num_kv_heads * (sizes.head_dim + 2),
        "num_kv_blocks": engine.num_kv_blocks,
        "generated": generate(engine, FP8_PROMPTS[:1], 3, ignore_eos=True),
    }


def main() -> None:
    for checkpoint in map(Path, sys.argv[1:]):
        family = json.loads((checkpoint / "config.json").read_text())["model_type"]
        found = {attention: answer(checkpoint, family, attention) for attention in ("torch", "fused")}
        if family == "qwen2":
            found["two ranks"] = answer_by_two_ranks(checkpoint)
        elif family == "qwen3":
            found["fp8"] = answer_in_fp8(checkpoint)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
