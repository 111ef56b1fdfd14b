"""bfloat16, as most nights run: packed layers, output layer and embeddings against transformers in float32."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import Engine, EngineConfig, Request, plan_prefix_groups
from engine.errors import ModelError

NUM_NEW_TOKENS = 12
LABELS = ((5,), (9, 11), (9, 400, 3))


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen2", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint(request.param)


@pytest.mark.parametrize("is_loaded", [False, True], ids=["from its folder", "already loaded"])
def test_answers_are_as_likely_as_rounding_allows(checkpoint: Path, is_loaded: bool) -> None:
    """Each greedy token is the best one for the tokens before it but for rounding, as are scores of labels.

    Weights that another holds as well are packed in copies.
    """
    wide = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).float()
    shared = [(7 * i) % 490 + 3 for i in range(50)]
    prompts = [[*shared, 20 + number, 30 + number] for number in range(9)] + [shared[:20], [4] * 70]
    generated = [
        Request(request_id=f"g{number}", token_ids=prompt, max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
        for number, prompt in enumerate(prompts)
    ]
    scored = [
        Request(request_id=f"s{number}", token_ids=prompt, mode="score", labels=LABELS)
        for number, prompt in enumerate(prompts)
    ]
    config = EngineConfig(dtype="bfloat16", device="cpu", kv_memory_bytes=1 << 23, max_num_batched_tokens=64)
    given: Path | PreTrainedModel = checkpoint
    if is_loaded:
        given = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    engine = Engine.load(given, config)
    requests = [*generated, *scored]
    answers = {
        answer.request_id: answer
        for answer in engine.run_plan(requests, plan_prefix_groups([request.token_ids for request in requests]))
    }
    for number, prompt in enumerate(prompts):
        written = list(answers[f"g{number}"].token_ids)
        assert len(written) == NUM_NEW_TOKENS
        logits = _logits(wide, [*prompt, *written])[len(prompt) - 1 : -1]
        chosen = logits[torch.arange(NUM_NEW_TOKENS), written]
        spread = logits.amax(-1) - logits.amin(-1)
        assert ((logits.amax(-1) - chosen) < 0.02 * spread).all()
        sums = [
            _logits(wide, [*prompt, *label])[len(prompt) - 1 : -1].log_softmax(-1)[range(len(label)), label].sum()
            for label in LABELS
        ]
        expected = torch.stack(sums).log_softmax(0)
        error = torch.tensor(answers[f"s{number}"].label_logprobs) - expected
        assert error.abs().max() < 0.03 * spread.mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loaded_model_answers_as_its_checkpoint(checkpoint: Path, dtype: torch.dtype) -> None:
    """Bit for bit: weights are bfloat16, and rotary frequencies, which are multiplied by positions, are not."""
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    config = EngineConfig(dtype="bfloat16", device="cpu", kv_memory_bytes=1 << 23)
    prompt = [(7 * i) % 490 + 3 for i in range(900)]
    requests = [Request(request_id="a", token_ids=prompt, mode="score", labels=LABELS)]
    assert Engine.load(loaded, config).score(requests) == Engine.load(checkpoint, config).score(requests)


def test_a_loaded_model_that_is_quantized_is_refused(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    product = model.model.layers[1].mlp.down_proj
    product.weight = torch.nn.Parameter(product.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ModelError, match=r"must not be quantized: model\.layers\.1\.mlp\.down_proj\.weight is"):
        Engine.load(model, EngineConfig(dtype="bfloat16", device="cpu", kv_memory_bytes=1 << 23))


@torch.inference_mode()
def _logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([token_ids])).logits[0]
    return logits
