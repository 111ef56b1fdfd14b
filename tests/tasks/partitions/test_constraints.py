"""The grammars of a workload's requests, compiled for a loaded model."""

import json
import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from engine import Engine, EngineConfig, Request
from tasks.answers.grammar_source import GrammarSource
from tasks.partitions.constraints import compile_constraints
from tasks.partitions.engine_host import LoadedModel
from tasks.prompts.prompt import RequestForm
from tasks.prompts.text_codec import TextCodec


def test_forced_text_that_spells_a_control_token_is_made_of_other_tokens(tiny_llama: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    control = tokenizer.eos_token
    schema = {"type": "object", "properties": {control: {"const": f"a{control}"}}, "required": [control]}
    sources = [
        GrammarSource("pattern", re.escape(f"{control}no{control}")),
        GrammarSource("schema", json.dumps(schema | {"additionalProperties": False})),
    ]
    engine = Engine.load(tiny_llama, EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 20))
    form = RequestForm(settings=[{"grammar": source} for source in sources], num_answer_tokens=100)
    compiled = compile_constraints(form, LoadedModel(engine=engine, codec=TextCodec(tokenizer.backend_tokenizer)))
    answers = engine.generate(
        [
            Request(request_id=str(index), token_ids=[4], max_new_tokens=100, **each)
            for index, each in enumerate(compiled.settings)
        ]
    )
    texts = [tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers]
    assert texts == [f"{control}no{control}", json.dumps({control: f"a{control}"})]


@pytest.mark.parametrize("pattern", ["[^<>]{1,400}", "[a-z |0-9]{60,200}"])
def test_added_tokens_are_no_text_of_a_pattern(thinking_checkpoint: Path, pattern: str) -> None:
    """Marks around thoughts, as Qwen3's, which are not special; a model that says anything draws them, too."""
    engine = Engine.load(thinking_checkpoint, EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 24))
    codec = TextCodec.load(thinking_checkpoint)
    form = RequestForm(settings=[{"grammar": GrammarSource("pattern", pattern)}], num_answer_tokens=60)
    ((grammar,),) = (
        each.values() for each in compile_constraints(form, LoadedModel(engine=engine, codec=codec)).settings
    )
    bits = grammar.new_matcher().compute_bitmask()
    marks = [codec.tokenizer.token_to_id(mark) for mark in ("<think>", "</think>")]
    assert not any(bits[mark // 8] >> (mark % 8) & 1 for mark in marks)
    settings = {"max_new_tokens": 60, "temperature": 2.0, "grammar": grammar}
    requests = [Request(request_id=str(seed), token_ids=[4, seed], seed=seed, **settings) for seed in range(60)]
    texts = [
        codec.decode(answer.token_ids[:-1]) for answer in engine.generate(requests) if answer.finish_reason == "eos"
    ]
    assert len(texts) > 5
    assert [text for text in texts if not re.fullmatch(pattern, text)] == []
