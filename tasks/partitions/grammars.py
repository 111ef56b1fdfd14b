"""The grammars of a workload's requests, compiled for the model that is loaded."""

from dataclasses import replace
from functools import lru_cache

from engine.engine import Engine
from engine.grammar import Grammar, Vocabulary
from tasks.answers.grammar_source import GrammarSource
from tasks.partitions.engine_host import LoadedModel
from tasks.prompts.prompt import RequestForm
from tasks.prompts.text_codec import TextCodec


def compile_grammars(form: RequestForm, model: LoadedModel) -> RequestForm:
    """The form with each `GrammarSource` compiled; what was compiled for the last partitions is used again.

    Raises:
        GrammarError: see `engine.grammar.Grammar`.
    """
    assert isinstance(model.engine, Engine), "an encoder decodes nothing"
    vocabulary = _make_vocabulary(model.codec, model.engine.vocab_size, model.engine.eos_token_ids)
    settings = [
        {**each, "grammar": _compile(each["grammar"], vocabulary)} if "grammar" in each else each
        for each in form.settings
    ]
    return replace(form, settings=settings)


@lru_cache(maxsize=1)
def _make_vocabulary(codec: TextCodec, vocab_size: int, eos_token_ids: frozenset[int]) -> Vocabulary:
    return Vocabulary(codec.tokenizer, vocab_size=vocab_size, eos_token_ids=eos_token_ids)


@lru_cache(maxsize=16)
def _compile(source: GrammarSource, vocabulary: Vocabulary) -> Grammar:
    make = {"pattern": Grammar.from_pattern, "schema": Grammar.from_json_schema, "lark": Grammar.from_lark}
    return make[source.syntax](source.text, vocabulary)
