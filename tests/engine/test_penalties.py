"""Penalties for repeated tokens: the answers are those of transformers."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from engine import Engine, EngineConfig, Penalties, Request
from engine.errors import RequestError

CONFIG = EngineConfig(dtype="float32", device="cpu", block_size=8, kv_memory_bytes=1 << 22)
NUM_NEW_TOKENS = 30


class AnswerPenalty(LogitsProcessor):
    """Presence and frequency penalties for the tokens after a prompt, written plainly."""

    def __init__(self, num_prompt_tokens: int, presence: float, frequency: float) -> None:
        self.first, self.presence, self.frequency = num_prompt_tokens, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        answer = input_ids[0, self.first :].tolist()
        for token in set(answer):
            scores[0, token] -= self.presence + self.frequency * answer.count(token)
        return scores


def expected(model: Any, prompt: list[int], penalties: Penalties | None) -> tuple[int, ...]:
    processors = LogitsProcessorList()
    if penalties is not None:
        processors.append(RepetitionPenaltyLogitsProcessor(penalties.repetition))
        processors.append(AnswerPenalty(len(prompt), penalties.presence, penalties.frequency))
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW_TOKENS, do_sample=False, pad_token_id=0,
            eos_token_id=None, logits_processor=processors,
        )  # fmt: skip
    return tuple(made[0, len(prompt) :].tolist())


@pytest.mark.parametrize("lookup", ["never", "always"])
def test_greedy_answers_are_those_of_transformers(tiny_llama: Path, lookup: Any) -> None:
    """All in one batch, below a shared beginning; the prompts repeat themselves, so guesses are right and wrong."""
    rng = random.Random(7)
    shared = [rng.randrange(3, 500) for _ in range(19)]
    kinds = [
        None,
        Penalties(repetition=1.3),
        Penalties(repetition=0.8),
        Penalties(presence=0.7),
        Penalties(frequency=-0.2),
        Penalties(repetition=1.1, presence=0.2, frequency=0.3),
    ]
    prompts = [shared + [rng.randrange(3, 500) for _ in range(5)] * 3 for _ in kinds]
    requests = [
        Request(
            request_id=str(i), token_ids=prompt, max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True, penalties=penalties
        )
        for i, (prompt, penalties) in enumerate(zip(prompts, kinds, strict=True))
    ]
    engine = Engine.load(tiny_llama, replace(CONFIG, prompt_lookup=lookup))
    found = {answer.request_id: answer.token_ids for answer in engine.generate(requests)}
    model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32)
    wanted = [expected(model, prompt, penalties) for prompt, penalties in zip(prompts, kinds, strict=True)]
    assert [found[str(i)] for i in range(len(kinds))] == wanted
    plain = {answer.request_id: answer.token_ids for answer in engine.generate(
        [Request(request_id=r.request_id, token_ids=r.token_ids, max_new_tokens=NUM_NEW_TOKENS, ignore_eos=True)
         for r in requests]
    )}  # fmt: skip
    assert all(plain[str(i)] != found[str(i)] for i in range(1, len(kinds)))


def test_penalties_are_one_of_the_things_that_tell_answers_apart() -> None:
    """Two rows with one prompt share an answer only if they share the penalties, too."""
    keys = {
        Request(request_id="a", token_ids=[1], penalties=penalties).answer_key
        for penalties in (None, Penalties(presence=1.0), Penalties(presence=1), Penalties(frequency=1.0))
    }
    assert len(keys) == 3


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"repetition": 0.0}, r"repetition_penalty must be above 0, got 0\.0"),
        ({"repetition": float("nan")}, "repetition_penalty must be a finite number, got nan"),
        ({"presence": float("inf")}, "presence_penalty must be a finite number, got inf"),
        ({"frequency": "1"}, "frequency_penalty must be a finite number, got '1'"),
    ],
)
def test_what_is_no_penalty_is_refused(settings: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        Penalties(**settings)


def test_penalties_are_for_generated_answers() -> None:
    with pytest.raises(RequestError, match="penalties belong to mode 'generate'"):
        Request(request_id="a", token_ids=[1], mode="embed", penalties=Penalties(presence=1.0))
    with pytest.raises(RequestError, match=r"penalties must be a Penalties, got 1\.5"):
        Request(request_id="a", token_ids=[1], penalties=1.5)  # type: ignore[arg-type]
