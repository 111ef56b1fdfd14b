"""Models in int8: near float32, and answers that do not depend on what else is computed, to the last bit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from engine import Engine, EngineConfig
from engine.errors import ConfigError, ModelError
from tests.engine.model.any_batch import KV_BYTES, Answers, answer, answer_alone, check_any_batch, requests_of

SHARED = [(7 * i) % 490 + 3 for i in range(150)]
PROMPTS = [
    *([*SHARED, 20 + number, 30 + number] for number in range(3)),
    *([*SHARED[:140], *range(10, 10 + 19 * number)] for number in range(1, 3)),
    *([4 + number] * (1 + 60 * number) for number in range(3)),
]


def load(checkpoint: Path, **settings: Any) -> Engine:
    given = {"dtype": "int8", "device": "cpu", "kv_memory_bytes": KV_BYTES} | settings
    return Engine.load(checkpoint, EngineConfig(**given))


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def checkpoint(
    request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Tied and not, with biases, with norms of the heads."""
    folder = tiny_checkpoint(request.param)
    if request.param != "qwen2":
        return folder
    config = AutoConfig.from_pretrained(folder)
    config.update({"hidden_size": 64, "vocab_size": 500})  # heads of 16, which native attention takes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.12).add_(parameter.data.mean().round())
    made = tmp_path_factory.mktemp("biases")
    model.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Answers:
    return answer_alone(load(checkpoint, max_num_batched_tokens=64), PROMPTS)


@pytest.mark.slow
@settings(max_examples=8)
@given(data=st.data())
def test_answers_do_not_depend_on_the_batch(data: st.DataObject, checkpoint: Path, alone: Answers) -> None:
    """In steps of any size."""
    sizes = st.sampled_from([1, 7, 33, 200, 2048])
    check_any_batch(data, partial(load, checkpoint), PROMPTS, alone, max_num_batched_tokens=sizes)


def test_answers_are_as_likely_as_bytes_allow(checkpoint: Path, alone: Answers) -> None:
    """Against transformers in float32."""
    wide = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    errors = []
    for number, prompt in enumerate(PROMPTS):
        written, _ = alone[f"g{number}"]
        assert isinstance(written, tuple)
        with torch.inference_mode():
            logits = wide(input_ids=torch.tensor([[*prompt, *written]])).logits[0][len(prompt) - 1 : -1]
        chosen = logits[torch.arange(len(written)), list(written)]
        spread = logits.amax(-1) - logits.amin(-1)
        errors.append(((logits.amax(-1) - chosen) / spread).numpy())
    assert np.concatenate(errors).max() < 0.06
    assert np.concatenate(errors).mean() < 0.006


@pytest.mark.parametrize("change", [{"device": "cuda"}, {"attention": "torch"}, {"attention": "fused"}])
def test_what_does_not_compute_int8_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="dtype 'int8' is computed on a CPU by attention 'native', got"):
        EngineConfig(dtype="int8", **change)


def test_sizes_that_int8_does_not_compute_are_refused(tiny_llama: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_llama)
    config.update({"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16})
    with pytest.raises(ModelError, match=r"multiples of 32, got a hidden size of 96, .* and 80 columns of queries"):
        Engine.load(AutoModelForCausalLM.from_config(config), EngineConfig(dtype="int8", kv_memory_bytes=KV_BYTES))


def test_a_model_that_somebody_else_holds_keeps_its_weights(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    requests = requests_of(PROMPTS, [0, 6])
    from_object = answer(
        Engine.load(model, EngineConfig(dtype="int8", device="cpu", kv_memory_bytes=KV_BYTES)), requests
    )
    assert len(from_object) == 6
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
