"""Scores of labels of which one begins another."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from engine import Engine, EngineConfig, Request
from engine.execution.nested_labels import set_apart


def test_a_label_is_scored_without_the_longer_ones() -> None:
    labels = ((1,), (1, 0), (1, 0, 0), (2,), (1, 3))
    begins = np.log([0.6, 0.4, 0.1, 0.3, 0.15])
    expected = [0.6 - 0.4 - 0.15, 0.4 - 0.1, 0.1, 0.3, 0.15]
    for order in itertools.permutations(range(5)):
        found = set_apart(begins[list(order)] + 7.0, [labels[place] for place in order])
        assert np.exp(found - 7.0) == pytest.approx([expected[place] for place in order])


def test_rounding_leaves_a_number() -> None:
    found = set_apart(np.array([-1.0, -1.0 + 1e-9]), ((1,), (1, 2)))
    assert math.isfinite(found[0])
    assert found[0] < -20


def test_scores_are_those_of_transformers(tiny_llama: Path) -> None:
    """By transformers' probabilities of what follows the prompt."""
    engine = Engine.load(tiny_llama, EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 22))
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    prompt = [5, 6, 7]
    first, second, third = engine.generate([Request(request_id="a", token_ids=prompt, max_new_tokens=3)])[0].token_ids
    labels = ((first,), (first, second), (first, third), (third,))

    def probabilities(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids])).logits[0, -1].double().softmax(0)

    begins, follows = probabilities(prompt), probabilities([*prompt, first])
    apart = torch.stack(
        [
            begins[first] * (1 - follows[second] - follows[third]),
            begins[first] * follows[second],
            begins[first] * follows[third],
            begins[third],
        ]
    )
    expected = (apart / apart.sum()).log().tolist()
    (found,) = engine.score([Request(request_id="a", token_ids=prompt, mode="score", labels=labels)])
    assert found.label_logprobs == pytest.approx(expected, abs=1e-4)
