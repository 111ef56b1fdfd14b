"""Models in int8: near float32, and answers that do not depend on what else is computed, to the last bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from engine import Engine, EngineConfig, Request, plan_prefix_groups
from engine.errors import ConfigError
from engine.request import Completion

KV_BYTES = 1 << 22
SHARED = [(7 * i) % 490 + 3 for i in range(150)]
PROMPTS = [
    *([*SHARED, 20 + number, 30 + number] for number in range(3)),
    *([*SHARED[:140], *range(10, 10 + 19 * number)] for number in range(1, 3)),
    *([4 + number] * (1 + 60 * number) for number in range(3)),
]
LABELS = ((5,), (9, 11), (9, 400, 3))


def load(checkpoint: Path, **settings: Any) -> Engine:
    given = {"dtype": "int8", "device": "cpu", "kv_memory_bytes": KV_BYTES} | settings
    return Engine.load(checkpoint, EngineConfig(**given))


def requests_of(numbers: list[int]) -> list[Request]:
    """Each prompt answered greedily, drawn, and scored."""
    asked = []
    for number in numbers:
        prompt = PROMPTS[number]
        asked += [
            Request(request_id=f"g{number}", token_ids=prompt, max_new_tokens=6, ignore_eos=True),
            Request(request_id=f"d{number}", token_ids=prompt, max_new_tokens=4, temperature=1.0, seed=number),
            Request(request_id=f"s{number}", token_ids=prompt, mode="score", labels=LABELS),
        ]
    return asked


def answer(engine: Engine, requests: list[Request]) -> dict[str, tuple[object, ...]]:
    """Token ids, and scores as they are: not one bit of a logit may differ."""

    def kept(found: Completion) -> tuple[object, ...]:
        assert found.error is None
        return tuple(found.token_ids), found.label_logprobs

    plan = plan_prefix_groups([request.token_ids for request in requests])
    return {found.request_id: kept(found) for found in engine.run_plan(requests, plan)}


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
def alone(checkpoint: Path) -> dict[str, tuple[object, ...]]:
    """Every request in a call of its own."""
    engine = load(checkpoint, max_num_batched_tokens=64)
    return {name: found for one in requests_of([*range(len(PROMPTS))]) for name, found in answer(engine, [one]).items()}


@pytest.mark.slow
@settings(max_examples=6)
@given(data=st.data())
def test_answers_do_not_depend_on_the_batch(
    data: st.DataObject, checkpoint: Path, alone: dict[str, tuple[object, ...]]
) -> None:
    """Any rows together, shared or not, in steps of any size, preempted or not, on one thread or two."""
    numbers = data.draw(st.lists(st.integers(0, len(PROMPTS) - 1), min_size=1, unique=True))
    chosen = data.draw(
        st.fixed_dictionaries(
            {
                "max_num_batched_tokens": st.sampled_from([1, 7, 33, 200, 2048]),
                "sharing": st.sampled_from(["path", "group", "lru", "none"]),
                "preemption": st.sampled_from(["recompute", "swap"]),
                "kv_memory_bytes": st.sampled_from([KV_BYTES, 1 << 18]),
                "output_reserve": st.sampled_from([0.0, 1.0]),
            }
        )
    )
    before = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
    found = answer(load(checkpoint, **chosen), requests_of(numbers))
    torch.set_num_threads(before)
    assert len(found) == 3 * len(numbers)
    assert found == {name: alone[name] for name in found}


def test_answers_are_as_likely_as_bytes_allow(checkpoint: Path, alone: dict[str, tuple[object, ...]]) -> None:
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


def test_a_model_that_somebody_else_holds_keeps_its_weights(tiny_llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    requests = requests_of([0, 6])
    from_object = answer(
        Engine.load(model, EngineConfig(dtype="int8", device="cpu", kv_memory_bytes=KV_BYTES)), requests
    )
    assert len(from_object) == 6
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
