"""Turns a workload's rows into prompts of one model, into token ids, and into requests to its engine."""

import hashlib
import secrets
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from engine.errors import ModelError, WorkloadError
from engine.planning.plan import Plan
from engine.request import Request
from tasks.prompts.text_codec import TextCodec
from tasks.workloads.workload import Prompt, Workload

if TYPE_CHECKING:
    from tasks.prompts.prompt_pieces import PromptPieces

Segments = tuple[tuple[str, str | None], ...]
Tokens = npt.NDArray[np.int32]
Encode = Callable[[Sequence[Mapping[str, str]]], Iterable[Tokens]]
"""Gives the token ids of each row's prompt; a row maps columns, and `SUFFIX`, to texts."""

SUFFIX = ""
"""Key of the trusted text that follows the template in a row's prompt; no column has this name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """A workload's prompt in one model's format, with gaps for the columns. Literals went through `TextCodec.trust`.
    The chat template is rendered once, around a placeholder: no row's text can change what the template does.

    Attributes:
        head, tail: the chat template's text before and after the user's message, up to where the answer begins.
        segments: of the user's message: a literal text, then the column that follows it (None at the end).
        strips_start, strips_end: the chat template drops white space at this end of the message.
        spaces: those that the chat template writes in front of an answer; tokens of most words begin with such a space.
        is_plain: plain text. The tokenizer adds its beginning-of-sequence token, which a chat template writes itself.
            Spaces at the end are left to the answer.
    """

    head: str
    segments: Segments
    tail: str
    strips_start: bool
    strips_end: bool
    spaces: str
    is_plain: bool

    def place(self, values: Mapping[str, str]) -> tuple[str, list[int]]:
        """The prompt of one row, for `TextCodec.encode`, and the position at which each column's value begins."""
        message, starts = "", []
        for literal, column in self.segments:
            message += literal
            if column is not None:
                starts.append(len(message))
                message += values[column]
        if suffix := values.get(SUFFIX, ""):
            starts.append(len(message))
        message = (message + suffix).removesuffix(self.ending(suffix)[1] if self.is_plain else "")
        stripped = message.lstrip() if self.strips_start else message
        stripped = stripped.rstrip() if self.strips_end else stripped
        num_stripped = len(message) - len(message.lstrip()) if self.strips_start else 0
        places = [len(self.head) + min(max(start - num_stripped, 0), len(stripped)) for start in starts]
        return self.head + stripped + self.tail, places

    def ending(self, suffix: str = "") -> tuple[str, str]:
        """The text that ends every prompt with this suffix, which is trusted, and the spaces in front of answers."""
        after_columns = takewhile(lambda segment: segment[1] is None, reversed(self.segments))
        message = "".join(reversed([literal for literal, _ in after_columns])) + suffix
        if not self.is_plain:
            return (message.rstrip() if self.strips_end else message) + self.tail, self.spaces
        stripped = message.rstrip(" ")
        return stripped, message[len(stripped) :]


def build_prompt_format(prompt: Prompt, codec: TextCodec, **variables: bool) -> PromptFormat:
    """Put a workload's prompt into the model's chat template, or leave it plain text where ``chat`` is false. Where the
    template takes no system message, it goes in front of the user's message, with a blank line between. Raises
    `ModelError` if there is no chat template, or if it does not carry a message through unchanged."""
    segments, head, tail, strips_start, strips_end = prompt.segments, "", "", False, False
    if prompt.chat:
        if not codec.has_chat_template:
            raise ModelError("the model's tokenizer has no chat template; set chat = false in the workload's [prompt]")
        system = prompt.system.strip()
        if system and not _takes_system(codec, variables):
            segments, system = ((f"{system}\n\n", None), *segments), ""
        head, tail = render_around("", system, codec, variables)
        spaced_head, spaced_tail = render_around(" \n", system, codec, variables)
        strips_start, strips_end = spaced_head == head, spaced_tail == tail
        if not (strips_start or spaced_head == head + " \n") or not (strips_end or spaced_tail == " \n" + tail):
            raise ModelError("the model's chat template changes the user's message")
    return PromptFormat(
        head=codec.trust(head),
        segments=tuple((codec.trust(literal), column) for literal, column in segments),
        tail=codec.trust(tail),
        strips_start=strips_start,
        strips_end=strips_end,
        spaces=_find_spaces(codec, variables) if prompt.chat else "",
        is_plain=not prompt.chat,
    )


def _takes_system(codec: TextCodec, variables: Mapping[str, bool]) -> bool:
    system = secrets.token_hex(16)
    try:
        return any(system in text for text in render_around("", system, codec, variables))
    except ModelError:
        return False


def _find_spaces(codec: TextCodec, variables: Mapping[str, bool]) -> str:
    """The spaces that the chat template writes between a prompt and its answer; none where it writes something else."""
    answer, messages = secrets.token_hex(16), [{"role": "user", "content": "question"}]
    try:
        prompt = codec.render_chat(messages, **variables)
        answered = [*messages, {"role": "assistant", "content": answer}]
        whole = codec.render_chat(answered, **{**variables, "add_generation_prompt": False})
    except ModelError:  # it takes no answers
        return ""
    between = whole.removeprefix(prompt).partition(answer)[0]
    return between if whole.startswith(prompt) and not between.strip(" ") else ""


def render_around(space: str, system: str, codec: TextCodec, variables: Mapping[str, bool]) -> tuple[str, str]:
    """The text of the chat template (`system`, `variables`) around a message between two `space`. See `render_chat`."""
    placeholder = f"A  message, \"<'&{secrets.token_hex(16)}\n\n."
    messages = [{"role": "system", "content": system}] if system else []
    text = codec.render_chat([*messages, {"role": "user", "content": space + placeholder + space}], **variables)
    parts = text.split(placeholder)
    if len(parts) != 2:
        raise ModelError(f"the model's chat template changes, repeats or drops a message: found {len(parts) - 1} times")
    return parts[0], parts[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestForm:
    """What the requests of a workload's rows have in common: parameters of `engine.Request`, one mapping for each
    request that a row makes, and the tokens to keep free for the longest answer; a label's last is never computed."""

    settings: Sequence[Mapping[str, Any]]
    num_answer_tokens: int

    @classmethod
    def of(cls, workload: Workload, codec: TextCodec | None, expected_output_tokens: int | None) -> "RequestForm":
        """The form of a workload. See `AnswerLength.expected_output_tokens`; raises as `build_prompt_format` and
        `TextCodec.encode_labels`. Kinds of answers without labels need no codec."""

        def encode_labels(labels: Sequence[str], suffix: str) -> Sequence[tuple[int, ...]]:
            assert codec is not None, "labels need a tokenizer"
            form = workload_format(workload.prompt, workload.kind.thinking, codec)
            try:
                return codec.encode_labels(labels, *form.ending(codec.trust(suffix)))
            except WorkloadError as error:
                raise WorkloadError(f"workload {workload.name!r}: {error}") from error

        settings = workload.kind.ask(encode_labels, expected_output_tokens)
        tails = [len(label) - 1 for each in settings for label in each.get("labels", ())]
        return cls(settings=settings, num_answer_tokens=max(tails, default=workload.kind.max_answer_tokens))

    def ask(self, rows: Plan, first_row_id: int = 0) -> list[Request]:
        """One request for each row of the plan, named by row id and sorted by it: `Plan.groups` numbers them so. The
        workload's own rows are numbered from `first_row_id`."""
        row_ids, priorities, requests = rows.row_id.tolist(), rows.priority.tolist(), []
        for row in np.argsort(rows.row_id).tolist():
            prompt, settings = rows.prompts[row], self.settings[(row_ids[row] - first_row_id) % len(self.settings)]
            if settings.get("temperature"):  # the row's own random stream: the workload's, mixed with its prompt
                salt = settings["seed"].to_bytes(8, "little")
                mixed = hashlib.blake2b(prompt.tobytes(), digest_size=8, salt=salt).digest()
                settings = {**settings, "seed": int.from_bytes(mixed, "little")}
            request_id, priority = str(row_ids[row]), priorities[row]
            requests.append(Request(request_id=request_id, token_ids=prompt, priority=priority, **settings))
        return requests


@lru_cache(maxsize=1)
def workload_format(prompt: Prompt, thinking: str, codec: TextCodec) -> PromptFormat:
    """See `build_prompt_format` and `AnswerKind.thinking`. Cached: tokenization and inference use the same format."""
    if thinking:
        from tasks.prompts.thinking import build_thinking_format  # imported only when needed

        return build_thinking_format(prompt, thinking, codec)
    return build_prompt_format(prompt, codec)


class PromptEncoder:
    """Encodes prompts of one format. It keeps tokens of shared text: use one encoder for a table, in one thread."""

    def __init__(self, form: PromptFormat, codec: TextCodec) -> None:
        self._form = form
        self._codec = codec
        self._pieces: PromptPieces | None = None

    def encode(self, rows: Sequence[Mapping[str, str]]) -> list[Tokens]:
        """Token ids of each row's prompt, equal to those that `TextCodec.encode` gives for the whole text."""
        placed = [self._form.place(row) for row in rows]
        if self._pieces is None and len(placed) > 1:
            from tasks.prompts.prompt_pieces import PromptPieces  # a single prompt shares no text

            self._pieces = PromptPieces(self._codec, add_special_tokens=self._form.is_plain)
        if self._pieces is not None:
            return self._pieces.encode(placed)
        return encode_texts(self._codec, [text for text, _ in placed], self._form.is_plain)


def encode_texts(codec: TextCodec, texts: Sequence[str], add_special_tokens: bool) -> list[Tokens]:
    """See `TextCodec.encode`; the token ids are arrays."""
    encoded = codec.encode(texts, add_special_tokens=add_special_tokens)
    return [np.frombuffer(struct.pack(f"{len(token_ids)}i", *token_ids), dtype=np.int32) for token_ids in encoded]
