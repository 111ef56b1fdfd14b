"""Checkpoints of the Hugging Face hub."""

from pathlib import Path

from engine.errors import ModelError
from engine.model.checkpoint import SENTENCE_FILES, TOKENIZER_FILES, resolve_checkpoint


def hub_snapshot(model: str) -> Path:
    """The folder of a hub id's checkpoint, fetched where it is not there yet.

    Raises:
        ModelError: it cannot be fetched, or holds no checkpoint.
    """
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES]
    patterns += SENTENCE_FILES
    try:
        folder = Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # offline, no such repository, no permission: the library's message says which
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {model!r}: neither a local checkpoint nor a hub id that can be fetched: {first_line}"
        ) from error
    return resolve_checkpoint(folder)
