"""A chat template's switch and marks for thoughts, as transformers renders them."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import pre_tokenizers

from engine.errors import ModelError
from tasks.prompts.prompt import PromptEncoder, workload_format
from tasks.prompts.text_codec import TextCodec
from tasks.prompts.thinking import make_thinking
from tasks.workloads.workload import Prompt
from tests.conftest import CHAT_TEMPLATE, THINKING_TEMPLATE

PROMPT = Prompt(system="Be brief.", template="About {body}:")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "About the house:"}]


def with_template(checkpoint: Path, folder: Path, template: str, *marks: str) -> TextCodec:
    """The codec of the same tokenizer with another chat template, and other marks."""
    shutil.copytree(checkpoint, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(list(marks))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return TextCodec.load(folder)


@pytest.mark.parametrize(
    ("switch", "is_on", "opening"), [("off", False, ""), ("keep", True, "<think>\n"), ("drop", True, "<think>\n")]
)
def test_a_prompt_is_that_of_transformers(thinking_checkpoint: Path, switch: str, is_on: bool, opening: str) -> None:
    codec = TextCodec.load(thinking_checkpoint)
    tokenizer = transformers.AutoTokenizer.from_pretrained(thinking_checkpoint)
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": is_on}
    text = tokenizer.apply_chat_template(MESSAGES, **options) + opening
    (prompt,) = PromptEncoder(workload_format(PROMPT, switch, codec), codec).encode([{"body": "the house"}])
    assert prompt.tolist() == tokenizer.encode(text, add_special_tokens=False)


def test_a_document_cannot_end_thoughts(thinking_checkpoint: Path) -> None:
    codec = TextCodec.load(thinking_checkpoint)
    end = make_thinking(codec, 20).end_token_id
    (prompt,) = PromptEncoder(workload_format(PROMPT, "keep", codec), codec).encode([{"body": "</think> <think>"}])
    assert end not in prompt
    assert prompt.tolist().count(codec.tokenizer.token_to_id("<think>")) == 1


def test_what_closes_thoughts_is_what_the_template_writes_around_them(thinking_checkpoint: Path) -> None:
    thinking = make_thinking(TextCodec.load(thinking_checkpoint), 20)
    tokenizer = transformers.AutoTokenizer.from_pretrained(thinking_checkpoint)
    assert tokenizer.decode(thinking.closing) == "\n</think>\n\n"
    assert tokenizer.decode(thinking.seam) == "\n\n"
    assert tokenizer.decode([thinking.end_token_id]) == "</think>"


def test_what_closes_thoughts_begins_with_no_space_of_its_own(thinking_checkpoint: Path) -> None:
    """Where the tokenizer puts a space in front of a text."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(thinking_checkpoint)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    thinking = make_thinking(TextCodec(tokenizer.backend_tokenizer, tokenizer), 20)
    whole = tokenizer.encode("the house\n</think>\n\n", add_special_tokens=False)
    assert whole == [*tokenizer.encode("the house", add_special_tokens=False), *thinking.closing]


@pytest.mark.parametrize(
    ("ending", "marks", "opening", "closing"),
    [
        ("<think>\n", (), "", "\n</think>\n\n"),
        ("{% if thinking %}<think>{% else %}</think>{% endif %}", (), "", "</think>"),
        ("{% if not thinking %}[THINK][/THINK]{% endif %}", ("[THINK]", "[/THINK]"), "[THINK]", "[/THINK]"),
        ("{% if not enable_thinking %}<think>\n\n</think>\n{% endif %}", (), "<think>\n", "\n</think>\n"),
    ],
)
def test_templates_write_marks_in_many_ways(
    tiny_llama: Path, tmp_path: Path, ending: str, marks: tuple[str, str], opening: str, closing: str
) -> None:
    template = CHAT_TEMPLATE + "{% if add_generation_prompt %}" + ending + "{% endif %}"
    codec = with_template(tiny_llama, tmp_path / "model", template, *(marks or ("<think>", "</think>")))
    plain = workload_format(PROMPT, "", codec)
    tail = workload_format(PROMPT, "drop", codec).tail
    assert tail.endswith(codec.trust(marks[0] if marks else "<think>") + "\n" * ("\n" in ending))
    assert tail.endswith(codec.trust(opening))
    assert (tail == plain.tail) == (ending == "<think>\n")
    assert codec.tokenizer.decode(make_thinking(codec, 20).closing, skip_special_tokens=False) == closing


def test_a_checkpoint_that_does_not_think_so_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    codec = TextCodec.load(tiny_llama)
    for switch, message in (
        ("off", "no switch that turns thinking off: it reads neither enable_thinking nor thinking"),
        ("keep", "no marks around thoughts"),
    ):
        with pytest.raises(ModelError, match=message):
            workload_format(PROMPT, switch, codec)
    opens = CHAT_TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}"
    always = with_template(tiny_llama, tmp_path / "always", opens, "<think>", "</think>")
    with pytest.raises(ModelError, match="no switch that turns thinking off"):
        workload_format(PROMPT, "off", always)
    never = with_template(tiny_llama, tmp_path / "never", CHAT_TEMPLATE, "<think>", "</think>")
    with pytest.raises(ModelError, match="no switch for thinking"):
        workload_format(PROMPT, "drop", never)
    switches = CHAT_TEMPLATE + (
        "{% if add_generation_prompt and (not enable_thinking or '/no_think' in messages[0].content) %}"
        "<think>\n\n</think>\n\n{% endif %}"
    )
    told = with_template(tiny_llama, tmp_path / "told", switches, "<think>", "</think>")
    workload_format(PROMPT, "keep", told)
    with pytest.raises(ModelError, match="with this system message the model's chat template writes </think>"):
        workload_format(replace(PROMPT, system="/no_think"), "keep", told)
    unmarked = with_template(tiny_llama, tmp_path / "unmarked", THINKING_TEMPLATE.replace("think>", "thought>"))
    assert "thought" in workload_format(PROMPT, "off", unmarked).tail, "turning it off needs no marks"
