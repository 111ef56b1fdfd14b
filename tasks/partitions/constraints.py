"""Compiles the grammars and thinking budgets of a workload's requests for the loaded model."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from engine.engine import Engine
from engine.grammar import Grammar, Vocabulary
from tasks.answers.grammar_source import GrammarSource
from tasks.partitions.engine_host import LoadedModel
from tasks.prompts.prompt import RequestForm
from tasks.prompts.text_codec import TextCodec
from tasks.prompts.thinking import make_thinking


def compile_constraints(form: RequestForm, model: LoadedModel) -> RequestForm:
    """The form with each `GrammarSource` and `ThinkingBudget` compiled; compiled grammars are cached. Raises
    `GrammarError`, see `engine.grammar.Grammar`, or as `make_thinking`."""
    assert isinstance(model.engine, Engine), "an encoder decodes nothing"
    compiled: list[Mapping[str, Any]] = []
    for settings in form.settings:
        if "grammar" in settings:
            vocabulary = _make_vocabulary(model.codec, model.engine.vocab_size, model.engine.eos_token_ids)
            settings = {**settings, "grammar": _compile(settings["grammar"], vocabulary)}
        if "thinking" in settings:
            settings = {**settings, "thinking": make_thinking(model.codec, settings["thinking"].max_tokens)}
        compiled.append(settings)
    return replace(form, settings=compiled)


@lru_cache(maxsize=1)
def _make_vocabulary(codec: TextCodec, vocab_size: int, eos_token_ids: frozenset[int]) -> Vocabulary:
    return Vocabulary(codec.encoder, vocab_size=vocab_size, eos_token_ids=eos_token_ids)


@lru_cache(maxsize=16)
def _compile(source: GrammarSource, vocabulary: Vocabulary) -> Grammar:
    make = {"pattern": Grammar.from_pattern, "schema": Grammar.from_json_schema, "lark": Grammar.from_lark}
    return make[source.syntax](source.text, vocabulary)
