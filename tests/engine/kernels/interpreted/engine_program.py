"""Run by test_interpreted_engine.py with TRITON_INTERPRET=1: the engine in fp8 against transformers in float32."""

import random
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from engine import Engine, EngineConfig, Request

RNG = random.Random(1)
DOCUMENT = [RNG.randrange(3, 500) for _ in range(20)]
PROMPTS = [*([*DOCUMENT, *(RNG.randrange(3, 500) for _ in range(length))] for length in (1, 7)), [9] * 3]
LABELS = tuple((token,) for token in RNG.sample(range(3, 500), 40))
KV_BYTES = 1 << 20


def expected_scores(checkpoint: Path) -> torch.Tensor:
    """Log-probabilities of each label after each prompt, normalised over the labels: ``[prompts, labels]``."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        logits = torch.stack([model(input_ids=torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
    return logits[:, [label[0] for label in LABELS]].log_softmax(-1)


def load(checkpoint: Path, **settings: Any) -> Engine:
    given = {"dtype": "fp8", "device": "cpu", "kv_memory_bytes": KV_BYTES, "block_size": 16} | settings
    return Engine.load(checkpoint, EngineConfig(**given))


def main() -> None:
    checkpoint = Path(sys.argv[1])
    engine = load(checkpoint, max_num_batched_tokens=16)
    assert engine._model.has_replaced_layers
    asked = [Request(request_id=str(i), token_ids=p, mode="score", labels=LABELS) for i, p in enumerate(PROMPTS)]
    found = torch.tensor([answer.label_logprobs for answer in engine.score(asked)])
    expected = expected_scores(checkpoint)
    # Of 3 mantissa bits in every product; a weight or a scale that is read wrong makes it as large as the scores' own.
    error = (found - expected).square().mean().sqrt() / expected.std()
    assert error < 0.25, error
    sizes = engine._model.kv_shape
    block_bytes = 16 * sizes.num_layers * 2 * sizes.num_kv_heads * (sizes.head_dim + 2)
    assert engine.num_kv_blocks == KV_BYTES // block_bytes
    answers = engine.generate([Request(request_id="g", token_ids=PROMPTS[0], max_new_tokens=3, ignore_eos=True)])
    assert len(answers[0].token_ids) == 3
    print(f"error {error:.3f}")


if __name__ == "__main__":
    main()
