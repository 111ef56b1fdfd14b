"""A checkpoint's tokenizer in one plain form, kept when it has been read once.

Which class reads a checkpoint's tokenizer is known to transformers' models, whose imports take seconds, torch's among
them. The Rust tokenizer that comes out, its special tokens and its chat template need none of that.
"""

import hashlib
import importlib.metadata
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.errors import ModelError
from engine.model.loading.checkpoint import TOKENIZER_FILES, cache_folder
from tasks.storage.artifact import replace_file


def load_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer of a checkpoint folder, read offline, without running any code of the checkpoint's.

    Raises:
        ModelError: there is none, it cannot be read, or it has no fast (Rust) form.
    """
    copy = cache_folder() / "tokenizers" / f"{_digest(folder)}.json"
    with suppress(Exception):  # there is none, or it is damaged
        return _build(json.loads(copy.read_bytes()))
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the loaders raise whatever a missing or damaged file leads them to
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"model {str(folder)!r}: its tokenizer cannot be read: {first_line}") from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
        raise ModelError(
            f"model {str(folder)!r}: tokenizer {type(tokenizer).__name__} has no fast form (tokenizer.json)"
        )
    with suppress(Exception):  # without a copy, the next night reads what this one has read
        _keep(tokenizer, copy)
    return tokenizer


def _digest(folder: Path) -> str:
    """Of all that the tokenizer is read from, and of the versions that read it."""
    versions = [importlib.metadata.version(name) for name in ("transformers", "tokenizers")]
    digest = hashlib.sha256(" ".join(versions).encode())
    for file in sorted(folder.glob("*")):
        if file.name in ("config.json", *TOKENIZER_FILES):
            digest.update(f"{file.name}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:32]


def _keep(tokenizer: Any, copy: Path) -> None:
    """Unless something is lost on the way."""
    parts = _take_apart(tokenizer)
    text = json.dumps(parts)
    if _take_apart(_build(json.loads(text))) == parts:
        copy.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replace_file(copy) as file:
            file.write(text.encode())


def _take_apart(tokenizer: Any) -> dict[str, Any]:
    """All of it that `TextCodec` uses, as JSON has it."""
    return {
        "tokenizer": tokenizer.backend_tokenizer.to_str(),
        "chat_template": tokenizer.chat_template,
        "model_max_length": tokenizer.model_max_length,
        **tokenizer.special_tokens_map,
    }


def _build(parts: dict[str, Any]) -> Any:
    """The opposite of `_take_apart`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(parts["tokenizer"]), **parts)
