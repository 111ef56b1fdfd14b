"""Text to token ids and back. Text of a document never becomes a control token.

A tokenizer matches control tokens (``<|im_end|>``, ``<s>``, ``[INST]``) anywhere in a text, so a document that spells
one could end its message and write the next. `TextCodec.trust` replaces the control tokens of trusted text (chat
template, system message, the workload's words) by secret stand-ins, and the encoder is the checkpoint's tokenizer with
its control tokens renamed to these. A control token in data (columns) is ordinary characters; other ids stay the same.

Loading a tokenizer with transformers imports torch and the model classes, which takes seconds. So the first load keeps
a JSON copy of the Rust tokenizer, its special tokens and its chat template, and later loads read the copy.
"""

import hashlib
import importlib.metadata
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.errors import ModelError, WorkloadError
from engine.model.loading.checkpoint import TOKENIZER_FILES, cache_folder, read_json
from engine.model.loading.config_sizes import find_size
from tasks.prompts.text_cuts import TextCuts, find_cuts
from tasks.storage.artifact import replace_file


class TextCodec:
    """The tokenizer of one checkpoint. Safe to use from several threads. `tokenizer` is the checkpoint's own, `encoder`
    the same with control tokens that no text spells; neither is to be changed."""

    def __init__(self, tokenizer: Tokenizer, chat: Any = None) -> None:
        """Wrap a Rust tokenizer, whose control tokens are among its added tokens, without changing it. Raises
        `ModelError` if it cannot be rebuilt with renamed control tokens.

        Args:
            chat: the transformers tokenizer that renders the chat template; None for plain text only.
        """
        spec = json.loads(tokenizer.to_str())
        control = {token["content"]: token for token in spec["added_tokens"] if _is_control(token)}
        secret = secrets.token_hex(16)
        self._stand_ins = {content: f"|control{secret}{i:06d}|" for i, content in enumerate(control)}
        names = sorted(control, key=len, reverse=True)  # of several at one place, the longest is found
        words = {name: rf"(?<!\w){re.escape(name)}(?!\w)" for name in names if control[name]["single_word"]}
        self._trusted_pattern = re.compile("|".join(words.get(name, re.escape(name)) for name in names) or r"(?!)")
        self.tokenizer = tokenizer
        self.encoder = _rename_tokens(spec, self._stand_ins, getattr(chat, "bos_token", None))
        self._chat = chat
        for content, stand_in in self._stand_ins.items():
            expected, actual = control[content]["id"], self.encoder.token_to_id(stand_in)
            if actual != expected:
                raise ModelError(f"tokenizer: control token {content!r} has id {expected}, but {actual} when rebuilt")

    @cached_property
    def cuts(self) -> TextCuts | None:
        """Where a text can be cut without changing its ids; None if not known."""
        return find_cuts(json.loads(self.tokenizer.to_str()), self._stand_ins)

    @classmethod
    def load(cls, folder: Path) -> "TextCodec":
        """Load the tokenizer of a checkpoint folder, offline, without running any code of the checkpoint. Raises
        `ModelError` if there is none, it cannot be read, or it has no fast (Rust) form. The last tokenizer stays loaded
        until a file of its folder changes: another load would take a second and sixty megabytes."""
        return cls._load_once(folder, _file_stamps(folder))

    @classmethod
    @lru_cache(maxsize=1)
    def _load_once(cls, folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> "TextCodec":
        tokenizer = load_tokenizer(folder)
        return cls(tokenizer.backend_tokenizer, tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None and bool(self._chat.chat_template)

    def render_chat(self, messages: Sequence[Mapping[str, str]], **variables: bool) -> str:
        """The chat template's text for messages and variables, up to the beginning of the answer; not yet trusted.
        Raises `ModelError` if the template refuses the messages."""
        try:
            options = {"tokenize": False, "add_generation_prompt": True, **variables}
            return str(self._chat.apply_chat_template(list(messages), **options))
        except Exception as error:  # a template is a program: it raises all kinds of errors, also of several lines
            roles, why = ", ".join(message["role"] for message in messages), " ".join(str(error).split())
            raise ModelError(f"the model's chat template refuses messages of roles {roles}: {why}") from error

    def trust(self, text: str) -> str:
        """`text` with its control tokens replaced by stand-ins, to which `encode` gives the control tokens' ids."""
        return self._trusted_pattern.sub(lambda match: self._stand_ins[match.group()], text)

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each text, computed in parallel. Trusted parts of the texts went through `trust`, data did not.
        With `add_special_tokens` each text gets the tokens that the tokenizer puts around a plain one."""
        encodings = self.encoder.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    def encode_labels(self, labels: Sequence[str], ending: str, spaces: str = "") -> list[tuple[int, ...]]:
        """Token ids of each label as it follows a prompt.

        The label is encoded behind the text that ends every prompt; the ids added to those of that text are the
        label's. Where a token would span both, the label is encoded alone: the prompt's own tokens never change.

        Args:
            labels: in the order of the workload.
            ending: the trusted text that ends every prompt; empty where a column's value does.
            spaces: between the prompt and each label; they are tokens of the label.
        Raises:
            WorkloadError: a label has no tokens, or the same ones as another.
        """
        ending = ending or "\n"
        trusted = [spaces + self.trust(label) for label in labels]
        known, *both = self.encode([ending, *(ending + text for text in trusted)], add_special_tokens=False)
        alone = self.encode(trusted, add_special_tokens=False)
        found: dict[tuple[int, ...], str] = {}
        for label, joined, single in zip(labels, both, alone, strict=True):
            follows = joined[: len(known)] == known and len(joined) > len(known)
            token_ids = tuple(joined[len(known) :] if follows else single)
            if not token_ids:
                raise WorkloadError(f"label {label!r} has no tokens with this model's tokenizer")
            if token_ids in found:
                raise WorkloadError(f"labels {found[token_ids]!r} and {label!r} are the same tokens {list(token_ids)}")
            found[token_ids] = label
        return list(found)

    @property
    def truncation(self) -> tuple[int | None, str]:
        """Most tokens of a text, special ones included, None where the tokenizer states no limit; the side to cut."""
        limit = getattr(self._chat, "model_max_length", None)
        return limit if limit is not None and limit < 1 << 30 else None, getattr(self._chat, "truncation_side", "right")

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of an answer, without its special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))


def check_tokenizer(folder: Path) -> bool:
    """Load a tokenizer of which there is no copy: it may be damaged, or the model may not know its tokens. Raises as
    `TextCodec.load`; false where it has unknown tokens, or no copy can be kept."""
    if not any(folder.glob("tokenizer*")) or (copy := _find_copy(folder)).is_file():
        return True
    TextCodec.load(folder)
    return copy.is_file()


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer of a checkpoint folder; raises as `TextCodec.load`."""
    copy = _find_copy(folder)
    with suppress(Exception):  # no copy yet, or a damaged one
        return _build(json.loads(copy.read_bytes()))
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except BaseException as error:  # of all kinds for a missing or damaged file; the Rust library panics
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        files = ", ".join(name for name in TOKENIZER_FILES if (folder / name).is_file())
        why = f"cannot be read from {files or 'no file'}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ModelError(f"model {str(folder)!r}: its tokenizer {why}") from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise ModelError(f"model {str(folder)!r}: {type(tokenizer).__name__} has no fast form (tokenizer.json)")
    config, token_ids = folder / "config.json", tokenizer.backend_tokenizer.get_vocab().values()
    if config.is_file() and max(token_ids, default=0) >= (size := find_size(read_json(config), "vocab_size")):
        from tasks.prompts.known_tokens import refuse_unknown  # imported only when needed

        refuse_unknown(folder, tokenizer.backend_tokenizer, size)
        return tokenizer
    with suppress(Exception):  # without a copy, the next load is slow again
        _keep(tokenizer, copy)
    return tokenizer


def _find_copy(folder: Path) -> Path:
    """The copy's path, with a digest of its version, the tokenizer's files, and the versions of their libraries."""
    versions = ["copy 2", *map(importlib.metadata.version, ("transformers", "tokenizers"))]
    digest = hashlib.sha256(" ".join(versions).encode())
    for file in sorted(folder.glob("*")):
        if file.name in ("config.json", *TOKENIZER_FILES):
            digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return cache_folder() / "tokenizers" / f"{digest.hexdigest()[:32]}.json"


def _keep(tokenizer: Any, copy: Path) -> None:
    """Write the copy, unless the tokenizer built from it would differ."""
    parts = _take_apart(tokenizer)
    text = json.dumps(parts)
    if _take_apart(_build(json.loads(text))) == parts:
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replace_file(copy) as file:
            file.write(text.encode())


def _take_apart(tokenizer: Any) -> dict[str, Any]:
    """What `TextCodec` uses of a tokenizer, as JSON values."""
    return {
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        **{name: getattr(tokenizer, name) for name in ("chat_template", "model_max_length", "truncation_side")},
        **tokenizer.special_tokens_map,
    }


def _build(parts: dict[str, Any]) -> Any:
    """The inverse of `_take_apart`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(parts["tokenizer"]), **parts)


def _file_stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and modification time of each file of a folder; empty if it cannot be read: the loader reports it."""
    with suppress(OSError):
        files = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
        return tuple((name, status.st_size, status.st_mtime_ns) for name, status in files)
    return ()


def _is_control(token: Mapping[str, Any]) -> bool:
    """Whether a token is special, or an added one that looks like markup, as ``<think>``, not a word or spaces."""
    content = token["content"].strip()
    return bool(token["special"]) or (len(content) > 2 and content[0] in "<[{|")


def _rename_tokens(spec: dict[str, Any], names: Mapping[str, str], bos: str | None) -> Tokenizer:
    """A serialized tokenizer, whose `spec` is changed, with the tokens of `names` renamed, and special: a grammar takes
    others for text. They are found beside any text, but `bos` only at its start if a normalizer prepends blanks."""
    model, prepends = spec["model"], '"Prepend"' in json.dumps(spec["normalizer"])
    for token in spec["added_tokens"]:
        if (content := token["content"]) in names:
            is_normalized = token["normalized"] and (content == bos or not prepends)
            token |= {"content": names[content], "special": True, "single_word": False, "normalized": is_normalized}
    vocab, has_ids = model["vocab"], isinstance(model["vocab"], dict)  # else Unigram's scores: an id is the position
    pairs = [(names.get(piece, piece), number) for piece, number in (vocab.items() if has_ids else vocab)]
    model["vocab"] = dict(pairs) if has_ids else pairs
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            pair for pair in model["merges"] if not {*pair, pair[0] + pair[1].removeprefix(prefix)} & names.keys()
        ]
    try:
        return Tokenizer.from_str(json.dumps(spec | {"truncation": None, "padding": None}))
    except Exception as error:  # the Rust library raises plain Exception
        raise ModelError(f"tokenizer: cannot be rebuilt with renamed control tokens: {error}") from error
