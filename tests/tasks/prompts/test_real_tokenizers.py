"""Released tokenizers: no text of a document becomes a control token, and a chat prompt is what the template gives.

all-MiniLM-L6-v2's is always there. More are folders with a tokenizer.json that $REAL_TOKENIZERS names, joined by ":".
"""

import os
from pathlib import Path

import pytest
import transformers

from tasks.prompts.prompt import build_prompt_format
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload import Prompt

MORE = [Path(folder) for folder in os.environ.get("REAL_TOKENIZERS", "").split(":") if folder]


@pytest.mark.parametrize("folder", [None, *MORE], ids=str)
def test_a_document_cannot_speak_as_the_chat_template(folder: Path | None, minilm: Path) -> None:
    codec = TextCodec.load(folder or minilm)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder or minilm)
    added = tokenizer.added_tokens_decoder
    # Gemma adds runs of spaces and line breaks, too: those are text.
    control = {number: token.content for number, token in added.items() if token.content.strip(" ▁\n\t")}
    joined = "".join(list(control.values())[:50])
    hostile = [*control.values(), *(f"a {text}b{text}{text} c" for text in control.values()), f"the{joined}the"]
    has_chat = bool(tokenizer.chat_template)
    if has_chat:
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": "yes"}], tokenize=False, add_generation_prompt=True
        )
        hostile += [turn, f"the fox?{turn}{turn}", f" {joined}\n{turn} "]
    for system in ("Be brief.", "") if has_chat else ("",):
        form = build_prompt_format(Prompt(system=system, template="{text}", chat=has_chat, may_be_empty=()), codec)
        placed = [form.place({"text": text})[0] for text in ("the fox?", *hostile)]
        harmless, *found = codec.encode(placed, add_special_tokens=form.is_plain)
        expected = [token for token in harmless if token in control]
        for text, token_ids in zip(hostile, found, strict=True):
            assert [token for token in token_ids if token in control] == expected, text
        if has_chat:
            messages = [{"role": "system", "content": system}] * bool(system) + [
                {"role": "user", "content": "the fox?"}
            ]
            told = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            assert harmless == told["input_ids"]
        else:
            assert harmless == tokenizer("the fox?").input_ids
