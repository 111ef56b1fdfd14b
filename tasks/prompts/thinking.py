"""Thinking of a checkpoint: its chat template's switch, and the marks around thoughts."""

import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from engine.errors import ModelError, RequestError
from engine.thinking import Thinking
from tasks.prompts.prompt import PromptFormat, build_prompt_format, render_around
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload import Prompt, Workload

ON = {"enable_thinking": True, "thinking": True}
OFF = {"enable_thinking": False, "thinking": False}
"""Variables of chat templates that switch thinking; templates read one of them and ignore the others."""

READS_NONE = "it reads neither enable_thinking nor thinking"


def check_thinking(workload: Workload, checkpoint: Path) -> None:
    """Check that the checkpoint supports a workload's key ``thinking``. Raises `ModelError`, see
    `build_thinking_format`, or `WorkloadError` if the budget is too small to close thoughts."""
    codec = TextCodec.load(checkpoint)
    try:
        build_thinking_format(workload.prompt, workload.kind.thinking, codec)
        for settings in workload.kind.ask(lambda labels, suffix: (), None):
            if "thinking" in settings:
                make_thinking(codec, settings["thinking"].max_tokens)
    except (ModelError, RequestError) as error:
        raise type(error)(f"workload {workload.name!r}: {error}") from error


def build_thinking_format(prompt: Prompt, switch: str, codec: TextCodec) -> PromptFormat:
    """As `build_prompt_format`, with thinking switched on or off; with thinking, a prompt ends where thoughts begin.

    Args:
        switch: "off", "keep" or "drop".
    Raises:
        ModelError: the template has no such switch, or the system message sets it to off (as SmolLM3's `/no_think`), or
            the tokenizer has no marks around thoughts.
    """
    if switch == "off":
        if not _has_switch(codec):
            raise ModelError(f"the model's chat template has no switch that turns thinking off: {READS_NONE}")
        return build_prompt_format(prompt, codec, **OFF)
    opening, _, mark = _find_texts(codec)
    form = build_prompt_format(prompt, codec, **ON)
    if codec.trust(mark) in form.tail:
        raise ModelError(f"with this system message the model's chat template writes {mark}, which turns thinking off")
    return replace(form, tail=form.tail + codec.trust(opening))


@lru_cache(maxsize=4)
def make_thinking(codec: TextCodec, max_tokens: int) -> Thinking:
    """The parameter of `engine.Request` for thoughts of at most `max_tokens`. Raises `ModelError` as
    `build_thinking_format`, or `RequestError` if the budget is too small to close thoughts."""
    _, closing, mark = _find_texts(codec)
    (token_ids,) = codec.encode_labels([closing], "a")  # as it follows thoughts: a text's beginning may get a space
    end = codec.tokenizer.token_to_id(mark)
    assert end is not None, "an added token has an id"
    return Thinking(end_token_id=end, closing=token_ids, max_tokens=max_tokens)


def _has_switch(codec: TextCodec) -> bool:
    (on_head, on_tail), (off_head, off_tail) = (render_around("", "", codec, each) for each in (ON, OFF))
    return (on_head, on_tail) != (off_head, off_tail)


def _find_marks(codec: TextCodec) -> tuple[str, str]:
    """The added tokens before and after thoughts, such as ``<think>`` and ``</think>``."""
    added = {token.content for token in codec.tokenizer.get_added_tokens_decoder().values()}
    for mark in sorted(added):
        if "think" in mark.lower() and f"{mark[0]}/{mark[1:]}" in added:
            return mark, f"{mark[0]}/{mark[1:]}"
    raise ModelError("the model's tokenizer has no marks around thoughts, such as <think> and </think>")


@lru_cache(maxsize=1)
def _find_texts(codec: TextCodec) -> tuple[str, str, str]:
    """The text that opens thoughts after the chat template's text, the text that closes them, and the closing mark.
    White space around the marks is taken from a prompt without thinking, which ends with empty thoughts."""
    if not codec.has_chat_template:
        raise ModelError("the model's tokenizer has no chat template, and thinking is a switch of one")
    (_, tail), (_, tail_without) = (render_around("", "", codec, each) for each in (ON, OFF))
    begin, end = _find_marks(codec)
    is_open = tail.rstrip().endswith(begin)
    if not is_open and not _has_switch(codec):
        raise ModelError(f"the model's chat template has no switch for thinking: {READS_NONE}")
    empty = re.search(rf"{re.escape(begin)}(\s*){re.escape(end)}(\s*)$", tail_without)
    if empty is None:
        space = tail[len(tail.rstrip()) :] if is_open else ""
        before, after, behind = space, space, 2 * space
    else:
        middle = len(empty[1]) // 2
        before, after, behind = empty[1][:middle], empty[1][middle:], empty[2]
    return "" if is_open else begin + before, after + end + behind, end
