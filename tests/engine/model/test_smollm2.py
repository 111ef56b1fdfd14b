"""A real checkpoint: SmolLM2-135M from its GGUF file, on real prompts, against transformers' generate."""

import inspect
from itertools import takewhile
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from engine import Engine, EngineConfig, Request

QUESTIONS = ("What is it for?", "Which keyword is used?", "Give one example.", "What happens on an error?")


@pytest.fixture(scope="module")
def engine(smollm2_gguf: Path, smollm2_unpacked: Path) -> Engine:
    """Of the file, whose weights have been unpacked."""
    return Engine.load(smollm2_gguf, EngineConfig(dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def stock(smollm2_unpacked: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(smollm2_unpacked, dtype=torch.float32)


@pytest.mark.slow
def test_greedy_ids_equal_generate_on_real_prompts(
    smollm2_unpacked: Path, engine: Engine, stock: PreTrainedModel
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_unpacked)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Answer in one sentence.\n\n{topics[name][:400]}\n\n{question}"}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for name in ("assert", "class", "lambda", "with")
        for question in QUESTIONS
    ]
    completions = engine.generate(
        [Request(request_id=str(i), token_ids=prompt, max_new_tokens=24) for i, prompt in enumerate(prompts)]
    )
    assert len(prompts) == 16
    assert sum(completion.num_cached_tokens for completion in completions) > 0.5 * sum(map(len, prompts))
    answers = [list(completion.token_ids) for completion in completions]
    ids = torch.tensor([prompts[7]])
    out = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0)
    assert answers[7] == out[0, ids.shape[1] :].tolist()
    # Ids are what greedy decoding gives if and only if each is the likeliest after those before it; one forward pass
    # of prompt and answer shows that of all of them. What the questions about a document share passes once.
    # transformers 5.24 has renamed it.
    cache_name = "cache" if "cache" in inspect.signature(stock.forward).parameters else "past_key_values"
    for first in range(0, len(prompts), len(QUESTIONS)):
        group = range(first, first + len(QUESTIONS))
        columns = zip(*(prompts[i] for i in group), strict=False)
        shared = [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, columns)]
        with torch.inference_mode():
            cache = stock(torch.tensor([shared]), use_cache=True, logits_to_keep=1)[cache_name]
        for prompt, answer in ((prompts[i], answers[i]) for i in group):
            assert len(answer) == 24 or answer[-1] == tokenizer.eos_token_id
            rest = torch.tensor([[*prompt[len(shared) :], *answer[:-1]]])
            with torch.inference_mode():
                logits = stock(rest, **{cache_name: cache}, logits_to_keep=len(answer)).logits[0]
            assert logits.argmax(dim=-1).tolist() == answer
            cache.crop(-rest.shape[1])


@pytest.mark.slow
def test_a_gguf_file_is_pooled_as_a_causal_model(engine: Engine, stock: PreTrainedModel) -> None:
    prompt = [1, 504, 9690, 2]
    (answer,) = engine.pool([Request(request_id="a", token_ids=prompt, mode="embed", normalize=False)])
    with torch.inference_mode():
        expected = stock.base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
    assert torch.from_numpy(answer.embedding).allclose(expected, atol=1e-3)
