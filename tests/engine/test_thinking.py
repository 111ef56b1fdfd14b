"""Thoughts before answers: those of transformers with the same tokens forced, under every policy, with any grammar."""

import dataclasses
import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor

from engine import Completion, Engine, EngineConfig, Grammar, Request, Thinking
from engine.errors import RequestError
from tests.engine.answers import assert_alike
from tests.engine.grammars import GrammarProcessor, load_vocabulary
from tests.engine.test_policies import AMPLE, MIXED, SINGLE, TIGHT, Settings, name_of, run, spell

CLOSINGS = ((), (5,), (5, 6), (5, 6, 7))
EOS = 2


class ThinkingProcessor(LogitsProcessor):
    """Masks the logits of one row: no end of sequence in its thoughts, what closes them, and then its grammar."""

    def __init__(self, request: Request) -> None:
        assert request.thinking is not None
        self._request, self._thinking = request, request.thinking
        self._num_prompt_tokens = len(request.token_ids)
        self._forced: list[int] = []
        self._grammar: GrammarProcessor | None = None
        self._is_thinking = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        said = input_ids[0, self._num_prompt_tokens :].tolist()
        closing, end = list(self._thinking.closing), self._thinking.end_token_id
        if self._is_thinking and end in said:
            self._is_thinking = False
            if said.index(end) == len(said) - 1:
                self._forced = closing[closing.index(end) + 1 :]
        elif self._is_thinking and len(said) == self._thinking.max_tokens - len(closing):
            self._is_thinking = False
            self._forced = closing
        if self._forced:
            only, *self._forced = self._forced
            return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([only]), 0.0)
        if self._is_thinking:
            return scores.index_fill(1, torch.tensor([EOS]), -torch.inf)
        if self._request.grammar is None:
            return scores
        self._grammar = self._grammar or GrammarProcessor(self._request.grammar, input_ids.shape[1], EOS)
        return self._grammar(input_ids, scores)


@pytest.fixture(scope="module")
def checkpoint(tiny_checkpoint: object) -> Path:
    return tiny_checkpoint("qwen3")  # type: ignore[operator, no-any-return]


@pytest.fixture(scope="module")
def workload(checkpoint: Path) -> list[Request]:
    """Prompts that share beginnings; thoughts that end early or late, answers of grammars and free ones, some short."""
    rng = random.Random(7)
    documents = [[rng.randrange(3, 500) for _ in range(length)] for length in (31, 17, 40)]
    prompts = [document + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 30))] for document in documents * 7]
    free = [Request(request_id=str(i), token_ids=prompt, max_new_tokens=40) for i, prompt in enumerate(prompts)]
    said = [answer.token_ids for answer in Engine.load(checkpoint, AMPLE).generate(free)]
    vocabulary = load_vocabulary(checkpoint)
    grammars = [
        Grammar.from_json_schema({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}}, vocabulary),
        Grammar.from_pattern("all of it is known", vocabulary),
        None,
    ]
    requests = []
    for i, prompt in enumerate(prompts):
        end = said[i][4 + i % 9] if i % 3 else 499  # the former is what the model says by itself
        closing = (*CLOSINGS[i % 4], end, *CLOSINGS[i // 4 % 4])
        thinking = Thinking(end_token_id=end, closing=closing, max_tokens=len(closing) + 1 + i * 5 % 26)
        requests.append(
            Request(
                request_id=str(i), token_ids=prompt, grammar=grammars[i % 5] if i % 5 < 3 else None,
                max_new_tokens=thinking.max_tokens + (30, 1, 3, 12)[i % 4], thinking=None if i == 19 else thinking,
            )
        )  # fmt: skip
    return requests


@pytest.fixture(scope="module")
def expected(checkpoint: Path, workload: list[Request]) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
    """Thoughts and answers by transformers, each request alone, greedy in float32."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    answers: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
    for request in workload:
        prompt = torch.tensor([request.token_ids.tolist()])
        with torch.inference_mode():
            tokens = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=request.max_new_tokens,
                do_sample=False, eos_token_id=EOS, pad_token_id=EOS,
                logits_processor=[ThinkingProcessor(request)] if request.thinking else [],
            )[0, prompt.shape[1] :].tolist()  # fmt: skip
        if request.thinking is None:
            answers[request.request_id] = (), tuple(tokens)
            continue
        end, most = tokens.index(request.thinking.end_token_id), request.max_new_tokens - request.thinking.max_tokens
        start = end + len(request.thinking.closing) - request.thinking.closing.index(tokens[end])
        answers[request.request_id] = tuple(tokens[:end]), tuple(tokens[start : start + most])
    return answers


def tokens_of(answers: dict[str, Completion]) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
    return {key: (answer.thinking_token_ids, answer.token_ids) for key, answer in answers.items() if not answer.error}


@pytest.mark.parametrize("settings", [*SINGLE, *MIXED[:3]], ids=name_of)
def test_thoughts_and_answers_are_those_of_transformers_under_every_policy(
    checkpoint: Path,
    workload: list[Request],
    expected: dict[str, tuple[Sequence[int], Sequence[int]]],
    settings: Settings,
) -> None:
    answers, _ = run(checkpoint, workload, dataclasses.replace(TIGHT, **settings))
    found = tokens_of(answers)
    assert len(found) == len(workload) or settings["preemption"] == "kill"
    assert found == {key: expected[key] for key in found}


def test_the_workload_holds_what_matters(
    workload: list[Request], expected: dict[str, tuple[Sequence[int], Sequence[int]]]
) -> None:
    """Thoughts that the model ends, thoughts that the budget ends, answers that are cut and others."""
    spent, early, cut = set(), set(), set()
    for request in workload:
        if request.thinking is not None:
            thoughts, answer = expected[request.request_id]
            num_closing = request.thinking.closing.index(request.thinking.end_token_id)
            is_spent = len(thoughts) - num_closing == request.thinking.max_tokens - len(request.thinking.closing)
            (spent if is_spent else early).add(request.grammar)
            cut.add(len(answer) == request.max_new_tokens - request.thinking.max_tokens)
    assert len(spent) == len(early) == 3
    assert len(cut) == 2


@pytest.mark.parametrize("limits", [AMPLE, TIGHT], ids=["ample", "tight"])
def test_overlapped_steps_and_another_process_change_nothing(
    checkpoint: Path,
    workload: list[Request],
    expected: dict[str, tuple[Sequence[int], Sequence[int]]],
    limits: EngineConfig,
) -> None:
    config = dataclasses.replace(limits, attention="torch")
    answers, steps = run(checkpoint, workload, config, overlaps_steps=True)
    assert tokens_of(answers) == expected
    assert (sum(step.num_preempted_requests for step in steps) > 0) == (limits is TIGHT)
    if limits is TIGHT:
        answers, _ = run(checkpoint, workload, dataclasses.replace(config, disaggregation="processes", num_threads=1))
        assert tokens_of(answers) == expected


def test_drawn_thoughts_do_not_depend_on_the_others(checkpoint: Path, workload: list[Request]) -> None:
    drawn = [dataclasses.replace(request, temperature=1.2, seed=i) for i, request in enumerate(workload)]
    together, _ = run(checkpoint, drawn, AMPLE)
    tight = dataclasses.replace(TIGHT, attention="torch")
    overlapped, _ = run(checkpoint, drawn, tight, overlaps_steps=True)
    guessed, _ = run(checkpoint, drawn, dataclasses.replace(tight, prompt_lookup="always"), overlaps_steps=True)
    assert_alike(overlapped, together)
    assert_alike(guessed, together)
    for request in drawn:
        thoughts = together[request.request_id].thinking_token_ids
        assert request.thinking is None or 0 < len(thoughts) < request.thinking.max_tokens
        assert EOS not in thoughts


def test_stop_strings_and_tokens_that_end_a_sequence_begin_after_the_thoughts(checkpoint: Path) -> None:
    request = Request(request_id="a", token_ids=[7, 8, 9], max_new_tokens=40, ignore_eos=True)
    engine = Engine.load(checkpoint, AMPLE)
    (free,) = engine.generate([request])
    thinking = Thinking(end_token_id=499, closing=(499, 11), max_tokens=22)
    thought = dataclasses.replace(request, thinking=thinking, max_new_tokens=62)
    (answer,) = engine.generate([thought])
    assert list(answer.thinking_token_ids) == list(free.token_ids[:20])
    assert len(answer.token_ids) == 40
    assert answer.num_output_tokens == 62
    stop = spell(answer.token_ids[2:5])
    for text, reason in ((stop, "stop"), (spell([*free.token_ids[-2:], 499, 11]), "length")):
        (stopped,) = engine.generate([dataclasses.replace(thought, stop=(text,))], decode=spell)
        assert stopped.finish_reason == reason
        assert stopped.thinking_token_ids == answer.thinking_token_ids
    first = spell([11, answer.token_ids[0]])  # across the seam, in which no answer is yet
    (stopped,) = engine.generate([dataclasses.replace(thought, stop=(first,))], decode=spell)
    assert first in spell(answer.token_ids) or len(stopped.token_ids) == 40


def test_closing_takes_no_steps_of_its_own(checkpoint: Path) -> None:
    vocabulary = load_vocabulary(checkpoint)
    text = "Answer the question with words from the text."
    grammar = Grammar.from_pattern(re.escape(text).replace("\\ ", " "), vocabulary)
    thinking = Thinking(end_token_id=499, closing=(5, 6, 499, 7, 8), max_tokens=10)
    request = Request(request_id="a", token_ids=[5, 6, 7], max_new_tokens=99, grammar=grammar, thinking=thinking)
    answers, steps = run(checkpoint, [request], AMPLE)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert tokenizer.decode(answers["a"].token_ids, skip_special_tokens=True) == text
    assert answers["a"].finish_reason == "eos"
    assert len(steps) == 5  # a step a thought; what follows them is known then


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"closing": (5, 6)}, "must hold token 499 once"),
        ({"closing": (499, 499)}, "must hold token 499 once"),
        ({"max_tokens": 2}, "at most 2 tokens are too short"),
        ({"max_tokens": "9"}, "must be whole numbers"),
        ({"max_tokens": 9.5}, "must be whole numbers"),
        ({"end_token_id": None}, "must be whole numbers"),
        ({"closing": 499}, "must be whole numbers"),
    ],
)
def test_thinking_that_cannot_be_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Thinking(**{"end_token_id": 499, "closing": (5, 499), "max_tokens": 9} | settings)  # type: ignore[arg-type]
    thinking = Thinking(end_token_id=499, closing=(5, 499), max_tokens=9)
    for wrong in ({"max_new_tokens": 9}, {"mode": "score", "labels": ((1,), (2,))}):
        with pytest.raises(RequestError, match="'a': thinking belongs to mode 'generate', with max_new_tokens above"):
            Request(request_id="a", token_ids=[1], thinking=thinking, **wrong)
