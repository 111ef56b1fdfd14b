"""Tokens of a tokenizer for which the model has no embedding: which may be there, and which prompts may use them."""

import json
import shutil
from pathlib import Path

import pytest
import transformers

from engine.errors import ModelError
from tasks.prompts.known_tokens import check_prompt
from tasks.prompts.text_codec import TextCodec, check_tokenizer
from tasks.workloads.workload import load_workload

NUM_TOKENS = 499
"""Of the tiny checkpoints' tokenizer."""


def copy_with(source: Path, folder: Path, vocab_size: int, *, marks_turns: bool = False) -> Path:
    """A checkpoint whose tokenizer has one token more, with which its chat template may mark turns."""
    shutil.copytree(source, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"vocab_size": vocab_size}))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<turn>"])
    if marks_turns:
        tokenizer.chat_template = tokenizer.chat_template.replace("<|im_start|>", "<turn>")
    tokenizer.save_pretrained(folder)
    return folder


def test_an_added_token_that_no_prompt_uses_may_be_unknown(tiny_llama: Path, tmp_path: Path) -> None:
    folder = copy_with(tiny_llama, tmp_path / "model", NUM_TOKENS)
    assert not check_tokenizer(folder), "and its prompts are checked"
    check_prompt(load_workload("snippets"), folder)
    assert max(TextCodec.load(folder).tokenizer.get_vocab().values()) == NUM_TOKENS
    assert check_tokenizer(copy_with(tiny_llama, tmp_path / "known", NUM_TOKENS + 1)), "and a copy is made"
    assert check_tokenizer(tmp_path / "known"), "there is a copy"


def test_an_unknown_token_of_every_prompt_is_named(tiny_llama: Path, tmp_path: Path) -> None:
    folder = copy_with(tiny_llama, tmp_path / "model", NUM_TOKENS, marks_turns=True)
    assert not check_tokenizer(folder)
    what = "config.json says vocab_size 499, and each prompt has the token '<turn>' with id 499"
    with pytest.raises(ModelError, match=f"^workload 'snippets': model '{folder}': {what}$"):
        check_prompt(load_workload("snippets"), folder)
    check_prompt(load_workload("embeddings"), folder)


def test_the_tokenizer_of_a_larger_model_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    folder = copy_with(tiny_llama, tmp_path / "model", NUM_TOKENS - 1)
    for load in (check_tokenizer, TextCodec.load):
        with pytest.raises(ModelError, match=r"config\.json says vocab_size 498, its tokenizer has ids up to 498$"):
            load(folder)
