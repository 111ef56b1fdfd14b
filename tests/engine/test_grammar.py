"""Answers of a grammar: those of transformers with the same masks, under every policy, however they are sampled."""

import dataclasses
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from engine import Engine, EngineConfig, Grammar, Request, Vocabulary
from engine.errors import GrammarError, RequestError
from tests.engine.answers import assert_alike
from tests.engine.grammars import generate_by_transformers, load_vocabulary
from tests.engine.test_policies import AMPLE, MIXED, SINGLE, TIGHT, Settings, name_of, run

SCHEMA = {
    "type": "object",
    "properties": {
        "vendor": {"type": "string", "maxLength": 12},
        "is_paid": {"type": "boolean"},
        "currency": {"enum": ["EUR", "USD", "GBP"]},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": ["string", "null"], "maxLength": 5}, "count": {"type": "integer"}},
                "required": ["name", "count"],
                "additionalProperties": False,
            },
            "maxItems": 2,
        },
    },
    "required": ["vendor", "is_paid", "currency", "items"],
    "additionalProperties": False,
}
LARK = 'start: "Dear " NAME ", " ("yes" | "no") "."\nNAME: /[A-Z][a-z]{1,9}/'


@pytest.fixture(scope="module")
def vocabulary(tiny_llama: Path) -> Vocabulary:
    return load_vocabulary(tiny_llama)


@pytest.fixture(scope="module")
def grammars(vocabulary: Vocabulary) -> list[Grammar | None]:
    return [
        Grammar.from_json_schema(SCHEMA, vocabulary),
        Grammar.from_pattern(r"[0-9]{4}-[0-9]{2}( and more)?", vocabulary),
        Grammar.from_lark(LARK, vocabulary),
        Grammar.from_pattern(r"all of it is known", vocabulary),
        Grammar.from_pattern(r"(?s:.*)", vocabulary),
        None,
    ]


@pytest.fixture(scope="module")
def workload(grammars: list[Grammar | None]) -> list[Request]:
    """Documents below an instruction, some prompts twice; every length of answer from one token on."""
    rng = random.Random(3)
    instruction = [rng.randrange(3, 500) for _ in range(21)]
    documents = [instruction + [rng.randrange(3, 500) for _ in range(length)] for length in (17, 40)]
    prompts = [document + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 30))] for document in documents * 8]
    prompts += [prompts[0], prompts[6], [7]]
    lengths = (90, 30, 1, 2, 60, 9, 45)
    return [
        Request(request_id=str(index), token_ids=prompt, max_new_tokens=lengths[index % 7], grammar=grammars[index % 6])
        for index, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, workload: list[Request]) -> dict[str, tuple[int, ...]]:
    return generate_by_transformers(tiny_llama, workload)


@pytest.mark.parametrize("settings", [*SINGLE, *MIXED[:3]], ids=name_of)
def test_greedy_answers_are_those_of_transformers_under_every_policy(
    tiny_llama: Path, workload: list[Request], expected: dict[str, tuple[int, ...]], settings: Settings
) -> None:
    answers, steps = run(tiny_llama, workload, dataclasses.replace(TIGHT, **settings))
    killed = {request_id for request_id, answer in answers.items() if answer.error is not None}
    assert not killed or settings["preemption"] == "kill"
    assert {key: answers[key].token_ids for key in answers.keys() - killed} == {
        key: expected[key] for key in answers.keys() - killed
    }
    if settings in ({"preemption": "recompute"}, {"preemption": "swap"}, {"preemption": "kill"}):
        assert sum(step.num_preempted_requests for step in steps) > 0


@pytest.mark.parametrize("limits", [AMPLE, TIGHT], ids=["ample", "tight"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_overlapped_steps_change_no_answer(
    tiny_llama: Path,
    workload: list[Request],
    expected: dict[str, tuple[int, ...]],
    limits: EngineConfig,
    preemption: str,
) -> None:
    config = dataclasses.replace(limits, attention="torch", preemption=preemption)
    answers, steps = run(tiny_llama, workload, config, overlaps_steps=True)
    assert {key: answer.token_ids for key, answer in answers.items()} == expected
    assert (sum(step.num_preempted_requests for step in steps) > 0) == (limits is TIGHT)
    costs_ms = sum(answer.compute_ms for answer in answers.values())
    assert costs_ms == pytest.approx(sum(step.duration_ms for step in steps))


def test_another_process_may_compute_the_prompts(
    tiny_llama: Path, workload: list[Request], expected: dict[str, tuple[int, ...]]
) -> None:
    config = dataclasses.replace(TIGHT, disaggregation="processes", num_threads=1)
    answers, _ = run(tiny_llama, workload, config)
    assert {key: answer.token_ids for key, answer in answers.items()} == expected


def test_each_answer_is_in_its_grammar_or_says_that_it_is_cut(
    tiny_llama: Path, workload: list[Request], grammars: list[Grammar | None]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    drawn = [
        dataclasses.replace(request, temperature=1.5, seed=index, top_p=0.9, top_k=index % 3 * 20)
        for index, request in enumerate(workload)
    ]
    greedy, _ = run(tiny_llama, workload, AMPLE)
    sampled, _ = run(tiny_llama, drawn, AMPLE)
    overlapped, _ = run(tiny_llama, drawn, dataclasses.replace(AMPLE, attention="torch"), overlaps_steps=True)
    assert_alike(overlapped, sampled)
    matches = [
        lambda text: json.loads(text).keys() == SCHEMA["properties"].keys(),  # type: ignore[attr-defined]
        re.compile(r"[0-9]{4}-[0-9]{2}( and more)?").fullmatch,
        re.compile(r"Dear [A-Z][a-z]{1,9}, (yes|no)\.").fullmatch,
        re.compile(r"all of it is known").fullmatch,
    ]
    reasons: set[tuple[int, str]] = set()
    for answers in (greedy, sampled):
        for index, request in enumerate(workload):
            answer, kind = answers[request.request_id], index % 6
            if kind < len(matches):
                reasons.add((kind, answer.finish_reason))
                text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
                if answer.finish_reason == "length":
                    assert len(answer.token_ids) == request.max_new_tokens
                else:
                    assert matches[kind](text), text
                    assert (answer.token_ids[-1] == 2) == (answer.finish_reason == "eos")
    assert {reason for _, reason in reasons} >= {"eos", "length"}


def test_an_answer_that_is_complete_without_room_for_its_end_is_not_cut(
    tiny_llama: Path, vocabulary: Vocabulary
) -> None:
    grammar = Grammar.from_pattern(r"all of it is known", vocabulary)
    tokens = AutoTokenizer.from_pretrained(tiny_llama).encode("all of it is known", add_special_tokens=False)
    requests = [
        Request(request_id=str(spare), token_ids=[9, 8, 7], max_new_tokens=len(tokens) + spare, grammar=grammar)
        for spare in (-1, 0, 1, 2)
    ]
    answers = Engine.load(tiny_llama, AMPLE).generate(requests)
    assert [answer.finish_reason for answer in answers] == ["length", "stop", "eos", "eos"]
    assert [list(answer.token_ids) for answer in answers] == [tokens[:-1], tokens, [*tokens, 2], [*tokens, 2]]


def test_forced_tokens_take_no_steps_of_their_own(tiny_llama: Path, vocabulary: Vocabulary) -> None:
    """They are computed with the prompt where they come first, and else as one chunk of the next step."""
    names = [f"column_{number}" for number in range(4)]
    properties: dict[str, Any] = {name: {"enum": ["0", "1"]} for name in names}
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    grammar = Grammar.from_json_schema(schema, vocabulary)
    request = Request(request_id="a", token_ids=[5, 6, 7], max_new_tokens=200, grammar=grammar)
    answers, steps = run(tiny_llama, [request], AMPLE)
    num_tokens = len(answers["a"].token_ids)
    assert answers["a"].finish_reason == "eos"
    assert (steps[0].num_suffix_tokens, steps[0].num_decode_tokens) == (3, len(grammar.opening)) > (3, 3)
    # All tokens but those behind the last choice are computed, in few steps.
    assert sum(step.num_decode_tokens + step.num_suffix_tokens for step in steps) <= 3 + num_tokens
    assert len(steps) < num_tokens / 2
    small, small_steps = run(tiny_llama, [request], dataclasses.replace(AMPLE, max_num_batched_tokens=2))
    assert small["a"].token_ids == answers["a"].token_ids
    assert max(step.num_tokens for step in small_steps) == 2


@pytest.mark.parametrize("name", ["day", "properties", "enum"])
@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("2024-02-29", True),
        ("2025-02-28", True),
        ("2025-02-29", False),
        ("1900-02-29", False),
        ("2000-02-29", True),
        ("2025-04-31", False),
        ("0000-01-01", False),
    ],
)
def test_dates_of_a_schema_are_in_the_calendar(
    tiny_llama: Path, vocabulary: Vocabulary, name: str, text: str, is_allowed: bool
) -> None:
    """Whatever the property's name, and whatever data of the same form the schema holds."""
    data = {"format": "date"}
    day = {"type": ["string", "null"], "format": "date", "examples": [data]}
    schema = {"type": "object", "properties": {name: day, "kind": {"const": data}}, "required": [name, "kind"]}
    matching = {"type": "object", "patternProperties": {name: day}, "additionalProperties": False}
    for held, value in ((schema, {name: text, "kind": data}), (matching, {name: text})):
        matcher = Grammar.from_json_schema(held, vocabulary).new_matcher()
        token_ids = AutoTokenizer.from_pretrained(tiny_llama).encode(json.dumps(value), add_special_tokens=False)
        assert (matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()) is is_allowed


def test_forced_text_has_the_tokens_of_the_models_own_tokenizer(tiny_llama: Path, vocabulary: Vocabulary) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    text = "Answer the question with words from the text: once upon a time, 12 nights."
    grammar = Grammar.from_pattern(re.escape(text).replace("\\ ", " "), vocabulary)
    (answer,) = Engine.load(tiny_llama, AMPLE).generate(
        [Request(request_id="a", token_ids=[4], max_new_tokens=100, grammar=grammar)]
    )
    assert list(answer.token_ids) == [*tokenizer.encode(text, add_special_tokens=False), 2]


def test_bfloat16_is_held_to_the_grammar_too(tiny_llama: Path, workload: list[Request]) -> None:
    """Where the output layer is packed, masked columns take no part in the product that finds the largest."""
    config = dataclasses.replace(AMPLE, dtype="bfloat16", block_size=32)
    answers, _ = run(tiny_llama, workload, config)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    texts = [
        tokenizer.decode(answers[str(index)].token_ids, skip_special_tokens=True)
        for index in range(len(workload))
        if index % 6 == 1 and answers[str(index)].finish_reason == "eos"
    ]
    assert texts
    assert all(re.fullmatch(r"[0-9]{4}-[0-9]{2}( and more)?", text) for text in texts)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda v: Grammar.from_pattern("(", v), "unclosed group"),
        (lambda v: Grammar.from_pattern("(?=a)b", v), "look-around"),
        (lambda v: Grammar.from_pattern(r"[^\x00-\x{10FFFF}]", v), "allows no answer"),
        (lambda v: Grammar.from_json_schema({"type": "strange"}, v), "strange"),
        (lambda v: Grammar.from_json_schema({"type": "string", "enum": []}, v), "(?i)unsatisfiable"),
        (lambda v: Grammar.from_json_schema({"not": {}}, v), "not"),
        (lambda v: Grammar.from_json_schema("{", v), "not JSON"),
        (lambda v: Grammar.from_json_schema('{"not": ' * 100_000 + "0" + "}" * 100_000, v), "nested too deeply"),
        (lambda v: Grammar.from_lark("start: other", v), "other"),
        (lambda v: Grammar.from_lark(None, v), "lark must be a string without lone surrogates, got None"),
        (lambda v: Grammar.from_pattern(b"a", v), "pattern must be a string without lone surrogates, got b'a'"),
        (lambda v: Grammar.from_pattern("\ud800", v), r"without lone surrogates, got '\\ud800'"),
        (lambda v: Grammar.from_json_schema({"enum": {1}}, v), "the JSON schema is not JSON: .* type set is not JSON"),
        (lambda v: Grammar.from_pattern("a", "v"), "vocabulary must be a Vocabulary, got 'v'"),
        (lambda v: Vocabulary(None, vocab_size=9, eos_token_ids=[1]), "no grammars with this tokenizer"),
        (lambda v: Vocabulary(None, vocab_size=9, eos_token_ids=5), "no grammars with .* 'int' object is not iterable"),
    ],
)
def test_a_grammar_that_cannot_be_is_refused(vocabulary: Vocabulary, make: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        make(vocabulary)


def test_requests_that_contradict_their_grammar_are_refused(tiny_llama: Path, vocabulary: Vocabulary) -> None:
    grammar = Grammar.from_pattern("a|b", vocabulary)
    for settings in ({"stop": ("x",)}, {"ignore_eos": True}, {"mode": "score", "labels": ((1,), (2,))}):
        with pytest.raises(RequestError, match="'a': a grammar belongs to"):
            Request(request_id="a", token_ids=[1], grammar=grammar, **settings)
    other = Grammar.from_pattern("a|b", load_vocabulary(tiny_llama, vocab_size=600))
    with pytest.raises(RequestError, match="of 600 tokens, the model has 512"):
        Engine.load(tiny_llama, AMPLE).generate([Request(request_id="a", token_ids=[1], grammar=other)])
    with pytest.raises(GrammarError, match="no end-of-sequence token"):
        Vocabulary(AutoTokenizer.from_pretrained(tiny_llama), vocab_size=512, eos_token_ids=())


def test_same_grammars_are_answered_once(tiny_llama: Path, vocabulary: Vocabulary) -> None:
    patterns = ("[ab]{3}", "[ab]{3}", "[cd]{3}")
    requests = [
        Request(request_id=str(index), token_ids=[5, 6], grammar=Grammar.from_pattern(pattern, vocabulary))
        for index, pattern in enumerate(patterns)
    ]
    answers = Engine.load(tiny_llama, AMPLE).generate(requests)
    assert answers[0].token_ids == answers[1].token_ids != answers[2].token_ids
    assert [answer.compute_ms > 0 for answer in answers] == [True, False, True]


def test_a_grammar_that_outgrows_its_limits_costs_one_request(
    tiny_llama: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of some patterns grow with each letter; the library gives up on the answer, and nobody else's."""
    exploding = Grammar.from_pattern("(?:.*a.{60}){3}", vocabulary)
    fine = Grammar.from_pattern("[ab]{3}", vocabulary)
    from llguidance import LLMatcher, LLParserLimits

    def compile_within(source: str, *, is_json: bool) -> LLMatcher:
        return LLMatcher(vocabulary._plain, source, log_level=0, limits=LLParserLimits(max_lexer_states=40))

    monkeypatch.setattr(vocabulary, "compile", compile_within)
    exploding.renew()
    requests = [
        Request(request_id=str(index), token_ids=[5, 6 + index], max_new_tokens=200, grammar=grammar)
        for index, grammar in enumerate([fine, exploding, fine])
    ]
    answers = Engine.load(tiny_llama, AMPLE).generate(requests)
    assert [answer.finish_reason for answer in answers] == ["eos", "error", "eos"]
    assert "the answer cannot go on: " in str(answers[1].error)
    assert torch.tensor(answers[1].token_ids).numel() == 0


def test_many_answers_may_meet_more_states_than_one(
    tiny_llama: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States are counted for all answers together; where these are too many, an answer goes on with its own."""
    classes = "a[0-9]{30}|b[a-c]{30}|c[d-f]{30}|d[g-i]{30}|e[j-l]{30}|f[m-o]{30}|g[p-r]{30}|h[s-u]{30}"
    grammar = Grammar.from_pattern(classes, vocabulary)
    requests = [
        Request(request_id=str(i), token_ids=[5 + i], max_new_tokens=60, grammar=grammar, temperature=9.0, seed=i)
        for i in range(12)
    ]
    expected = [answer.token_ids for answer in Engine.load(tiny_llama, AMPLE).generate(requests)]
    from llguidance import LLMatcher, LLParserLimits

    num_compiled = 0

    def compile_within(source: str, *, is_json: bool) -> LLMatcher:
        nonlocal num_compiled
        num_compiled += 1
        return LLMatcher(vocabulary._plain, source, log_level=0, limits=LLParserLimits(max_lexer_states=90))

    monkeypatch.setattr(vocabulary, "compile", compile_within)
    grammar.renew()
    answers = Engine.load(tiny_llama, AMPLE).generate(requests)
    assert [answer.token_ids for answer in answers] == expected
    assert {answer.finish_reason for answer in answers} == {"eos"}
    assert num_compiled > 1


def test_prompts_may_be_embedded_beside_grammars(tiny_llama: Path, vocabulary: Vocabulary) -> None:
    grammar = Grammar.from_pattern("[ab]{3}", vocabulary)
    requests = [
        Request(request_id="text", token_ids=[5, 6], grammar=grammar),
        Request(request_id="vector", token_ids=[5, 6, 7], mode="embed"),
    ]
    alone = Engine.load(tiny_llama, AMPLE)
    answers, _ = run(tiny_llama, requests, AMPLE)
    assert answers["text"].token_ids == alone.generate(requests[:1])[0].token_ids
    assert answers["vector"].embedding is not None
