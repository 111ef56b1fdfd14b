"""How the rows of a workload become prompts of one model: the chat template around the workload's own template."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile

from engine.errors import ModelError
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload_file import Prompt

Segments = tuple[tuple[str, str | None], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """A workload's prompt in the form of one model, rendered up to the columns; literals are `TextCodec.trust`-ed.

    The chat template runs once, around a placeholder for the user's message, not once a row: what a document says
    cannot steer the template's own logic.

    Attributes:
        head: the chat template's text before the user's message, the system message included; empty for plain text.
        segments: of the user's message: a literal text, then the column that follows it (None at the end).
        tail: the chat template's text after the user's message, up to where the answer begins; empty for plain text.
        strips_start: the chat template drops white space at the start of the message.
        strips_end: it drops white space at the message's end.
        add_special_tokens: the tokenizer puts its beginning-of-sequence token; a chat template has written its own.
    """

    head: str
    segments: Segments
    tail: str
    strips_start: bool
    strips_end: bool
    add_special_tokens: bool

    def place(self, values: Mapping[str, str]) -> tuple[str, list[int]]:
        """The prompt of one row, for `TextCodec.encode`, and where in it each column's value begins."""
        message, starts = "", []
        for literal, column in self.segments:
            message += literal
            if column is not None:
                starts.append(len(message))
                message += values[column]
        stripped = self._strip(message)
        num_stripped = len(message) - len(message.lstrip()) if self.strips_start else 0
        places = [len(self.head) + min(max(start - num_stripped, 0), len(stripped)) for start in starts]
        return self.head + stripped + self.tail, places

    @property
    def ending(self) -> str:
        """What follows the last column: the same in every prompt."""
        after_columns = takewhile(lambda segment: segment[1] is None, reversed(self.segments))
        message = "".join(reversed([literal for literal, _ in after_columns]))
        return (message.rstrip() if self.strips_end else message) + self.tail

    def _strip(self, message: str) -> str:
        message = message.lstrip() if self.strips_start else message
        return message.rstrip() if self.strips_end else message


def build_prompt_format(prompt: Prompt, codec: TextCodec) -> PromptFormat:
    """Puts a workload's prompt into the model's chat template, or leaves it plain text where ``chat`` is false.

    A system message that the chat template has no place for is put before the user's message, a blank line between.

    Raises:
        ModelError: there is no chat template, or it does not carry a message through unchanged.
    """
    segments, head, tail, strips_start, strips_end = prompt.segments, "", "", False, False
    if prompt.chat:
        if not codec.has_chat_template:
            raise ModelError("the model's tokenizer has no chat template; set chat = false in the workload's [prompt]")
        system = prompt.system.strip()
        if system and not _takes_system(system, codec):
            segments, system = ((f"{system}\n\n", None), *segments), ""
        head, tail = _render_around("", system, codec)
        spaced_head, spaced_tail = _render_around(" \n", system, codec)
        strips_start, strips_end = spaced_head == head, spaced_tail == tail
        if not (strips_start or spaced_head == head + " \n") or not (strips_end or spaced_tail == " \n" + tail):
            raise ModelError("the model's chat template does not carry a user's message through unchanged")
    return PromptFormat(
        head=codec.trust(head),
        segments=tuple((codec.trust(literal), column) for literal, column in segments),
        tail=codec.trust(tail),
        strips_start=strips_start,
        strips_end=strips_end,
        add_special_tokens=not prompt.chat,
    )


def _takes_system(system: str, codec: TextCodec) -> bool:
    try:
        head, _ = _render_around("", system, codec)
    except ModelError:
        return False
    return system in head


def _render_around(space: str, system: str, codec: TextCodec) -> tuple[str, str]:
    """The chat template's text before and after a user's message that begins and ends with `space`."""
    placeholder = f"message{secrets.token_hex(16)}"
    messages = [{"role": "system", "content": system}] if system else []
    text = codec.render_chat([*messages, {"role": "user", "content": space + placeholder + space}])
    parts = text.split(placeholder)
    if len(parts) != 2:
        raise ModelError(f"the model's chat template repeats or drops a user's message: found {len(parts) - 1} times")
    return parts[0], parts[1]
