"""A real checkpoint: SmolLM2-135M from its GGUF file, on real prompts, against transformers' generate."""

import inspect
from itertools import takewhile
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from engine import Engine, EngineConfig, Request
from engine.model.loading.checkpoint import resolve_checkpoint
from engine.model.loading.gguf import unpack_gguf

QUESTIONS = ("What is it for?", "Which keyword is used?", "Give one example.", "What happens on an error?")


@pytest.mark.slow
def test_greedy_ids_equal_generate_on_real_prompts(smollm2_gguf: Path) -> None:
    folder = unpack_gguf(resolve_checkpoint(smollm2_gguf))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": f"Answer in one sentence.\n\n{topics[name][:400]}\n\n{question}"}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for name in ("assert", "class", "del", "for", "import", "lambda", "try", "with")
        for question in QUESTIONS
    ]
    engine = Engine.load(folder, EngineConfig(dtype="float32", device="cpu"))
    completions = engine.generate(
        [Request(request_id=str(i), token_ids=prompt, max_new_tokens=24) for i, prompt in enumerate(prompts)]
    )
    assert len(prompts) == 32
    assert sum(completion.num_cached_tokens for completion in completions) > 0.5 * sum(map(len, prompts))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, completion in zip(prompts[::7], completions[::7], strict=True):
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, pad_token_id=0
        )
        assert list(completion.token_ids) == out[0, len(prompt) :].tolist()
    # Ids are what greedy decoding gives if and only if each is the likeliest after those before it; one forward pass
    # of prompt and answer shows that of all of them. What the questions about a document share passes once.
    answers = [list(completion.token_ids) for completion in completions]
    # transformers 5.24 has renamed it.
    cache_name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for first in range(0, len(prompts), len(QUESTIONS)):
        group = range(first, first + len(QUESTIONS))
        columns = zip(*(prompts[i] for i in group), strict=False)
        shared = [ids[0] for ids in takewhile(lambda ids: len(set(ids)) == 1, columns)]
        with torch.inference_mode():
            cache = model(torch.tensor([shared]), use_cache=True, logits_to_keep=1)[cache_name]
        for prompt, answer in ((prompts[i], answers[i]) for i in group):
            assert len(answer) == 24 or answer[-1] == tokenizer.eos_token_id
            rest = torch.tensor([[*prompt[len(shared) :], *answer[:-1]]])
            with torch.inference_mode():
                logits = model(rest, **{cache_name: cache}, logits_to_keep=len(answer)).logits[0]
            assert logits.argmax(dim=-1).tolist() == answer
            cache.crop(-rest.shape[1])


@pytest.mark.slow
def test_a_gguf_file_is_pooled_as_a_causal_model(smollm2_gguf: Path) -> None:
    prompt = [1, 504, 9690, 2]
    engine = Engine.load(smollm2_gguf, EngineConfig(dtype="float32", device="cpu"))
    (answer,) = engine.pool([Request(request_id="a", token_ids=prompt, mode="embed", normalize=False)])
    model = AutoModel.from_pretrained(unpack_gguf(resolve_checkpoint(smollm2_gguf)), dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).last_hidden_state[0, -1]
    assert torch.from_numpy(answer.embedding).allclose(expected, atol=1e-3)
