"""llguidance beside xgrammar, without a model: ``.peers/vllm/bin/python -m benchmarks.grammars FOLDER [--out FILE]``.

FOLDER is a checkpoint whose tokenizer is used. Each library compiles the grammars of typed answers (eight columns with
a calendar date, a list of structs, an ENUM of 1,000 values, a pattern, a text of up to 2,000 characters) and gives the
mask of every token of the same answers. The libraries take turns in rounds; each compiles again, without a cache and on
one thread. Figures are medians of processor time: of the compilation, of the mean mask of the first answer, whose
grammar states are new, and of the other answers. If a mask forbids the answer's token, no figures are given.

Texts are without escapes, which not every library allows in a text of limited length.

Also counted: the tokens of each answer that the library reports as forced (xgrammar gives text; its tokens are those of
the model's tokenizer without the last one, which may merge with the following text); and which texts the library
accepts as values of DuckDB's types, each type written as the best JSON schema for it.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
from llguidance.numpy import fill_next_token_bitmask
from transformers import AutoConfig, AutoTokenizer

from benchmarks.measuring.machine import describe_machine
from benchmarks.measuring.result_file import report
from benchmarks.measuring.turns import in_turn
from benchmarks.measuring.wrong_answer import WrongAnswerError, refuse_wrong_answers
from engine.grammar import DAY

NAMES = [f"{word} {number * 7919 % 10_007}" for number in range(200) for word in ("north", "Süd", "a-b", "x/y", "no")]
TYPES: dict[str, tuple[Any, tuple[str, ...], tuple[str, ...]]] = {
    "TINYINT": ({"type": "integer", "minimum": -128, "maximum": 127}, ("-128", "127"), ("-129", "128", "01")),
    "HUGEINT": (
        {"type": "integer", "minimum": -(2**127), "maximum": 2**127 - 1},
        (str(2**127 - 1), str(-(2**127))),
        (str(2**127), "1" * 60),
    ),
    "DATE": ({"type": "string", "pattern": f"^{DAY}$"}, ('"2024-02-29"', '"0001-01-01"'), ('"2023-02-29"',)),
    "ENUM": ({"enum": ["it's", 'q"{']}, ('"it\'s"', '"q\\"{"'), ('"Q"', '""')),
    "VARCHAR of 3": ({"type": "string", "maxLength": 3}, ('"ab"', '"äß→"', '"\\n\\"\\\\"'), ('"abcd"', '"a\nb"')),
    "VARCHAR of 3 with a pattern": (
        {"type": "string", "pattern": "^(?:[a-z]+)$", "maxLength": 3},
        ('"abc"',),
        ('"abcd"', '"A"'),
    ),
    "BOOLEAN, nullable": ({"type": ["boolean", "null"]}, ("true", "null"), ("1", '"true"')),
    "INTEGER[] of 2": (
        {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        ("[]", "[1, 2]"),
        ("[1, 2, 3]",),
    ),
}


def objects(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


def make_cases(rng: random.Random) -> dict[str, tuple[dict[str, Any], list[str]]]:
    """Name to schema and answers."""
    day = {"type": "string", "pattern": f"^{DAY}$"}
    text = {"type": "string", "maxLength": 2000}
    columns = objects(
        vendor_name={"type": ["string", "null"], "maxLength": 16},
        invoice_number={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        invoice_date=day,
        currency={"enum": ["EUR", "USD", "GBP", None]},
        total_amount={"type": ["number", "null"]},
        number_of_items={"type": "integer", "minimum": 0, "maximum": 65535},
        is_already_paid={"type": ["boolean", "null"]},
        payment_terms={"enum": ["30 days net", "60 days net", "on receipt", None]},
    )
    item = objects(name={"type": "string", "maxLength": 30}, quantity={"type": "integer", "minimum": 0, "maximum": 255})
    words = ["steel", "paper", "Łódź", "O'Hara & Co", "{lamp}", "30 hours"]

    def invoice() -> dict[str, Any]:
        number, day = f"AB-{rng.randrange(10_000):04}", f"20{rng.randrange(10, 99)}-0{rng.randrange(1, 10)}-17"
        chosen = [rng.choice(words)[:16], number, day, rng.choice(["EUR", None]), rng.randrange(9999) / 100]
        return dict(zip(columns["properties"], [*chosen, rng.randrange(65536), True, "on receipt"], strict=True))

    def items() -> list[Any]:
        return [{"name": rng.choice(words), "quantity": rng.randrange(256)} for _ in range(rng.randrange(1, 8))]

    made: list[tuple[str, dict[str, Any], Callable[[], Any]]] = [
        ("eight columns", columns, invoice),
        (
            "list of structs",
            objects(items={"type": "array", "items": item, "maxItems": 20}),
            lambda: {"items": items()},
        ),
        ("ENUM of 1,000", objects(place={"enum": NAMES}), lambda: {"place": rng.choice(NAMES)}),
        ("pattern", objects(day=day), lambda: {"day": f"19{rng.randrange(10, 99)}-12-{rng.randrange(10, 31)}"}),
        ("max_chars 2,000", objects(text=text), lambda: {"text": " ".join(rng.choices(words, k=rng.randrange(9, 90)))}),
    ]
    return {name: (schema, [json.dumps(make(), ensure_ascii=False) for _ in range(8)]) for name, schema, make in made}


class LLGuidance:
    """llguidance as the engine uses it: JSON on one line."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: int) -> None:
        text = tokenizer.backend_tokenizer.to_str()
        plain = llguidance.LLTokenizer(text, n_vocab=vocab_size, eos_token=[eos])
        self._tokenizer = plain.with_slices(plain.json_slices())

    def compile(self, schema: Mapping[str, Any]) -> Any:
        options: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def start(self, compiled: Any) -> Any:
        return compiled.deep_copy()

    def fill(self, matcher: Any, mask: np.ndarray) -> None:
        fill_next_token_bitmask(matcher, mask)

    def accept(self, matcher: Any, token_id: int) -> None:
        matcher.consume_token(token_id)

    def count_forced(self, matcher: Any) -> int:
        return len(matcher.compute_ff_tokens())

    def accepts(self, compiled: Any, text: str) -> bool:
        matcher, tokens = self.start(compiled), self._tokenizer.tokenize_str(text)
        return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


class XGrammar:
    """xgrammar: JSON on one line, compiled on one thread."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: int) -> None:
        import torch
        import xgrammar

        self._library, self._torch, self._tokenizer = xgrammar, torch, tokenizer
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=[eos])
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, schema: Mapping[str, Any]) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema), any_whitespace=False, separators=(", ", ": "))

    def start(self, compiled: Any) -> Any:
        return self._library.GrammarMatcher(compiled, terminate_without_stop_token=True)

    def fill(self, matcher: Any, mask: np.ndarray) -> None:
        if not matcher.fill_next_token_bitmask(self._torch.from_numpy(mask)):
            mask[:] = -1  # every token is allowed

    def accept(self, matcher: Any, token_id: int) -> None:
        matcher.accept_token(token_id)

    def count_forced(self, matcher: Any) -> int:
        text = "" if matcher.is_terminated() else matcher.find_jump_forward_string()
        return max(0, len(self._tokenizer.encode(text, add_special_tokens=False)) - 1)

    def accepts(self, compiled: Any, text: str) -> bool:
        matcher = self.start(compiled)
        return bool(matcher.accept_string(text) and matcher.is_completed())


def answer(library: Any, compiled: Any, token_ids: Sequence[int], mask: np.ndarray) -> list[float]:
    """Processor seconds of each token's mask; raises if one forbids the token."""
    matcher, seconds = library.start(compiled), []
    for place, token_id in enumerate(token_ids):
        started = time.process_time()
        library.fill(matcher, mask)
        seconds.append(time.process_time() - started)
        if not mask[0, token_id // 32] >> (token_id % 32) & 1:
            raise WrongAnswerError(f"{type(library).__name__} does not allow token {place} of {[*token_ids]}")
        library.accept(matcher, token_id)
    return seconds


def count_forced(library: Any, compiled: Any, token_ids: Sequence[int]) -> int:
    """How many of an answer's tokens are forced."""
    matcher, forced, skipped = library.start(compiled), 0, 0
    for token_id in token_ids:
        skipped = skipped - 1 if skipped > 0 else library.count_forced(matcher)
        forced += skipped > 0
        library.accept(matcher, token_id)
    return forced


def judge_types(library: Any) -> dict[str, str]:
    """By type, which values the library wrongly refuses or accepts; empty if none."""
    found = {}
    for name, (schema, texts, others) in TYPES.items():
        try:
            compiled = library.compile(schema)
            wrong = [f"refuses {text[:40]}" for text in texts if not library.accepts(compiled, text)]
            wrong += [f"takes {text[:40]}" for text in others if library.accepts(compiled, text)]
            found[name] = "; ".join(wrong)
        except (ValueError, RuntimeError) as error:
            found[name] = f"cannot be compiled: {str(error).splitlines()[0][:100]}"
    return found


def measure(libraries: Mapping[str, Any], tokenizer: Any, vocab_size: int, num_rounds: int) -> dict[str, Any]:
    """Milliseconds of processor time and shares of forced tokens, by case and library."""
    mask = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
    cases, found = make_cases(random.Random(3)), {}
    for case, (schema, texts) in cases.items():
        answers = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        timed: dict[str, dict[str, list[float]]] = {n: {"compile": [], "first": [], "others": []} for n in libraries}
        compiled_by: dict[str, Any] = {}
        for number in range(num_rounds):
            for name, library in in_turn(libraries.items(), number):
                started = time.process_time()
                compiled = compiled_by[name] = library.compile(schema)
                timed[name]["compile"].append(time.process_time() - started)
                first, *others = (answer(library, compiled, token_ids, mask) for token_ids in answers)
                timed[name]["first"].append(statistics.mean(first))
                timed[name]["others"].append(statistics.mean(s for seconds in others for s in seconds))
        num_tokens = sum(map(len, answers))
        found[case] = {
            name: {f"{kind}_ms": round(statistics.median(values) * 1e3, 4) for kind, values in timed[name].items()}
            | {"forced": round(sum(count_forced(library, compiled_by[name], a) for a in answers) / num_tokens, 3)}
            for name, library in libraries.items()
        }
        for name, figures in found[case].items():
            print(f"{case:16} {name:11} " + ", ".join(f"{key} {value:g}" for key, value in figures.items()), flush=True)
    return found


@refuse_wrong_answers
def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.grammars", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="checkpoint, whose tokenizer is used")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--libraries", nargs="+", choices=["llguidance", "xgrammar"], default=["llguidance", "xgrammar"]
    )
    parser.add_argument("--out", type=Path, help="result file, JSON")
    options = parser.parse_args(arguments)
    machine = describe_machine()
    tokenizer, config = AutoTokenizer.from_pretrained(options.folder), AutoConfig.from_pretrained(options.folder)
    kinds = {"llguidance": LLGuidance, "xgrammar": XGrammar}
    libraries = {name: kinds[name](tokenizer, config.vocab_size, tokenizer.eos_token_id) for name in options.libraries}
    cases = measure(libraries, tokenizer, config.vocab_size, options.rounds)
    types = {name: judge_types(library) for name, library in libraries.items()}
    for name, verdicts in types.items():
        print(
            f"{name}: "
            + ("; ".join(f"{t}: {wrong}" for t, wrong in verdicts.items() if wrong) or "all types as they are")
        )
    versions = {name: version(name) for name in libraries}
    report("grammars", arguments, options.out, machine=machine, versions=versions, cases=cases, types=types)
    return 0


if __name__ == "__main__":
    sys.exit(main())
