"""Checkpoints that are not local folders: a GGUF file, or a repository on the Hugging Face hub."""

import os
from pathlib import Path

from engine.errors import ModelError
from engine.model.loading.checkpoint import TOKENIZER_FILES, resolve_checkpoint

SENTENCE_FILES = (
    *("modules.json", "config_sentence_transformers.json", "sentence_*_config.json"),
    *("[0-9]*_*/config.json", "[0-9]*_*/model.safetensors"),
)
"""Patterns of sentence-transformers' files, which configure how a checkpoint computes embeddings."""

SMALL_FILES = ("config.json", "generation_config.json", *TOKENIZER_FILES, *SENTENCE_FILES)


def open_file(model: str | Path) -> Path:
    """The folder of a GGUF file, made once in the cache folder. Raises `ModelError` for any other file, or as
    `resolve_checkpoint`."""
    path = Path(model).expanduser()
    if path.suffix != ".gguf":
        raise ModelError(f"model {str(model)!r}: a file must be a .gguf file; else name the checkpoint's folder")
    from engine.model.loading.gguf import open_gguf

    return resolve_checkpoint(open_gguf(path))


def hub_snapshot(model: str) -> Path:
    """The folder of a hub id's checkpoint, downloaded if needed. Raises `ModelError` if the name looks like a path, or
    the repository cannot be downloaded or has no checkpoint.

    Args:
        model: ORG/NAME, or ORG/NAME@REVISION for a branch, a tag or a commit.
    """
    if _is_named_as_path(model):
        raise ModelError(f"model {model!r}: no such file or folder")
    return resolve_checkpoint(_fetch(model, [*SMALL_FILES, "*.safetensors", "*.safetensors.index.json"]))


def resolve_head(model: str | Path) -> Path:
    """A folder with the model's config.json and tokenizer files; the weights of a hub id are not downloaded.

    Args:
        model: see `resolve_checkpoint`.
    Raises:
        ModelError: there is no such checkpoint, or one of its files is missing.
    """
    if os.path.exists(os.path.expanduser(model)) or _is_named_as_path(str(model)):
        return resolve_checkpoint(model)
    folder = _fetch(str(model), [name for name in SMALL_FILES if not name.endswith(".safetensors")])
    if not (folder / "config.json").is_file():
        raise ModelError(f"model {str(model)!r}: the repository holds no config.json")
    if not any(folder.glob("*.safetensors")) and not _has_weights(str(model)):
        raise ModelError(f"model {str(model)!r}: the repository holds no *.safetensors file")
    return folder


def _is_named_as_path(model: str) -> bool:
    name = model.partition("@")[0]  # a revision may hold slashes
    return model.endswith(".gguf") or model.startswith((".", "~", "/")) or name.count("/") > 1 or "\0" in model


def _split(model: str) -> tuple[str, str | None]:
    """The repository of a hub id and its revision, None for the newest; `ModelError` if it is empty."""
    name, at, revision = model.partition("@")
    if at and not revision:
        raise ModelError(f"model {model!r}: no revision follows the @")
    return name, revision or None


def _fetch(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    name, revision = _split(model)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except Exception as error:  # offline, no such repository, no permission
        raise ModelError(f"model {model!r}: no such file or folder here, and {_describe(error)}") from error


def _describe(error: Exception) -> str:
    """Why the hub gave nothing: an error of `huggingface_hub` as the end of a line."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError):
        return "the Hugging Face hub cannot be reached"
    if isinstance(error, errors.GatedRepoError):
        return "the hub gives it only to those with access: set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the hub has no such repository, or it is private and needs HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return "its repository has no such revision: name a branch, a tag or a whole commit hash"
    first_line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"the hub gives nothing: {first_line}"


def _has_weights(model: str) -> bool:
    from huggingface_hub import list_repo_files

    name, revision = _split(model)
    try:
        files = list_repo_files(name, revision=revision)
    except Exception as error:  # offline, and only the small files are in the hub's cache
        raise ModelError(f"model {model!r}: its weights are not here, and {_describe(error)}") from error
    return any("/" not in file and file.endswith(".safetensors") for file in files)
