"""Every supported family against transformers itself: same greedy ids, same logits, whatever the schedule."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import Completion, Engine, EngineConfig, Request, StepRecord, plan_prefix_groups

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "odd")
NUM_NEW_TOKENS = 16
AMPLE = {"kv_memory_bytes": 1 << 24, "max_num_batched_tokens": 2048}
SCHEDULES = {
    "ample": AMPLE,
    "prompts split into chunks": {"kv_memory_bytes": 1 << 24, "max_num_batched_tokens": 13},
    "blocks of one token": {"kv_memory_bytes": 1 << 24, "block_size": 1},
    "blocks longer than prompts": {"kv_memory_bytes": 1 << 24, "block_size": 256},
}


def prompts() -> list[list[int]]:
    """Two levels of shared beginnings, uneven lengths, duplicates, a prompt that begins another, one token alone."""
    rng = random.Random(5)
    instruction = [rng.randrange(3, 500) for _ in range(21)]
    documents = [[rng.randrange(3, 500) for _ in range(length)] for length in (17, 40, 90)]
    made = [
        instruction + document + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 45))]
        for document in documents
        for _ in range(5)
    ]
    made += [made[0], made[7], instruction, instruction + documents[1], [7], [11] * 60]
    rng.shuffle(made)
    return made


def requests() -> list[Request]:
    return [
        Request(request_id=str(i), token_ids=prompt, max_new_tokens=NUM_NEW_TOKENS)
        for i, prompt in enumerate(prompts())
    ]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint(request.param)


@pytest.fixture(scope="module")
def greedy_answers(checkpoint: Path) -> list[list[int]]:
    """What transformers' own generate gives for two prompts, and would give for the others.

    Ids are greedy if and only if each is the likeliest after those before it: one forward pass of prompt and answer
    shows that of all of them.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    given = answers(load(checkpoint, **AMPLE).generate(requests()))
    for prompt, answer in list(zip(prompts(), given, strict=True))[:2]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        assert answer == out[0, len(prompt) :].tolist()
    end = model.config.eos_token_id
    for prompt, answer in zip(prompts(), given, strict=True):
        assert len(answer) == NUM_NEW_TOKENS or answer[-1] == end
        assert end not in answer[:-1]
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer[:-1]]]), logits_to_keep=len(answer)).logits[0]
        assert logits.argmax(dim=-1).tolist() == answer
    return given


def load(checkpoint: Path, **settings: Any) -> Engine:
    return Engine.load(checkpoint, EngineConfig(dtype="float32", device="cpu", **settings))


def answers(completions: list[Completion]) -> list[list[int]]:
    return [list(completion.token_ids) for completion in completions]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_greedy_ids_equal_generate(checkpoint: Path, greedy_answers: list[list[int]], schedule: str) -> None:
    engine = load(checkpoint, **SCHEDULES[schedule])
    assert answers(engine.generate(requests())) == greedy_answers


def test_greedy_ids_survive_preemption(checkpoint: Path, greedy_answers: list[list[int]]) -> None:
    """Memory for little more than the longest request, handed out by what is held now, so that answers overrun it."""
    ample = load(checkpoint, **AMPLE, block_size=8)
    longest = max(map(len, prompts())) + NUM_NEW_TOKENS
    bytes_per_block = ample._cache.keys[0][0].nbytes * 2 * len(ample._cache.keys)
    engine = load(
        checkpoint,
        block_size=8,
        max_num_batched_tokens=64,
        output_reserve=0.0,
        kv_memory_bytes=bytes_per_block * (-(-longest // 8) + 2),
    )
    steps: list[StepRecord] = []
    groups = plan_prefix_groups(prompts())
    completions = {c.request_id: c for c in engine.run_plan(requests(), groups, on_step=steps.append)}
    assert [list(completions[r.request_id].token_ids) for r in requests()] == greedy_answers
    assert sum(step.num_preempted_requests for step in steps) > 0
    assert max(step.num_kv_blocks_used for step in steps) <= engine.num_kv_blocks


@pytest.mark.parametrize("max_num_batched_tokens", [2048, 13])
def test_logits_agree(checkpoint: Path, max_num_batched_tokens: int) -> None:
    check_logits(checkpoint, load(checkpoint, kv_memory_bytes=1 << 24, max_num_batched_tokens=max_num_batched_tokens))


@pytest.mark.parametrize("attention", ["auto", "torch"])
@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama", {}),
        ("odd", {}),
        ("mistral", {}),
        ("mistral", {"use_sliding_window": False, "layer_types": ["full_attention"] * 2}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"use_sliding_window": False}),
        ("qwen3", {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_layers_have_the_windows_that_transformers_gives_them(
    family: str, values: dict[str, object], attention: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """transformers' Llama has no window, whatever config.json says, and its Mistral one in every layer."""
    folder = tmp_path / "windowed"
    shutil.copytree(tiny_checkpoint(family), folder)
    config = json.loads((folder / "config.json").read_text()) | {"sliding_window": 16, "layer_types": None} | values
    (folder / "config.json").write_text(json.dumps({key: config[key] for key in config if config[key] is not None}))
    settings = {"kv_memory_bytes": 1 << 24, "max_num_batched_tokens": 29}
    check_logits(folder, load(folder, **settings, attention=attention))


def check_logits(checkpoint: Path, engine: Engine) -> None:
    """Scoring every token of the vocabulary as a label gives the log-probabilities of the next token."""
    labels = tuple((token,) for token in range(engine.vocab_size))
    scored = engine.score(
        [Request(request_id=str(i), token_ids=p, mode="score", labels=labels) for i, p in enumerate(prompts())]
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for prompt, completion in zip(prompts(), scored, strict=True):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)
        assert (torch.tensor(completion.label_logprobs, dtype=torch.float64) - expected).abs().max() < 1e-4


def test_labels_of_several_tokens_score_as_teacher_forced(checkpoint: Path) -> None:
    labels = ((5,), (6, 7), (6, 8, 9, 10), (11, 5))
    engine = load(checkpoint, kv_memory_bytes=1 << 24, max_num_batched_tokens=29)
    scored = engine.score(
        [Request(request_id=str(i), token_ids=p, mode="score", labels=labels) for i, p in enumerate(prompts())]
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for prompt, completion in zip(prompts(), scored, strict=True):
        sums = []
        for label in labels:
            with torch.inference_mode():
                logprobs = model(torch.tensor([prompt + list(label)])).logits[0].double().log_softmax(-1)
            sums.append(sum(logprobs[len(prompt) - 1 + i, token] for i, token in enumerate(label)))
        expected = torch.stack(sums).log_softmax(0)
        assert (torch.tensor(completion.label_logprobs, dtype=torch.float64) - expected).abs().max() < 1e-4
        assert completion.finish_reason == "scored"
        assert completion.num_output_tokens == 0
