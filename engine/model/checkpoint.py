"""A model's files: a local folder, a GGUF file converted once, or a hub id's snapshot; and which are supported."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ModelError

if TYPE_CHECKING:  # takes seconds to import
    from transformers import PretrainedConfig

_CONVERTER_VERSION = 1
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)


def resolve_checkpoint(model: str | Path) -> Path:
    """A local folder with config.json, safetensors weights and tokenizer files.

    Args:
        model: a checkpoint folder, a .gguf file (converted once, then kept in the cache folder), or a hub id.
    Raises:
        ModelError: nothing readable is there; the message says what was looked for.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"model {str(model)!r}: the folder holds no config.json")
        if not any(path.glob("*.safetensors")):
            raise ModelError(f"model {str(model)!r}: the folder holds no *.safetensors file")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model {str(model)!r}: a file must be a .gguf file; else name the checkpoint's folder")
        return _converted_gguf(path)
    if path.suffix == ".gguf" or path.is_absolute() or str(model).startswith((".", "~")) or str(model).count("/") > 1:
        raise ModelError(f"model {str(model)!r}: no such file or folder")
    return _hub_snapshot(str(model))


def checkpoint_digest(folder: Path) -> str:
    """Identity of a checkpoint: sha256 over its configuration, tokenizer files and weight files' headers and sizes.

    Weights are not read whole: a safetensors header names every tensor and its place, and the file's last bytes
    are sampled with it, so that another revision of the same architecture has another digest.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.name in ("config.json", "generation_config.json", *_TOKENIZER_FILES):
            digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
        elif file.suffix == ".safetensors":
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode() + _weight_sample(file))
    return digest.hexdigest()


def _weight_sample(file: Path, num_samples: int = 64, sample_bytes: int = 4096) -> bytes:
    """Digest of a weight file's beginning and of evenly spread samples: milliseconds, whatever its size."""
    size = file.stat().st_size
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        digest.update(stream.read(1 << 16))
        for i in range(num_samples):
            stream.seek(max(0, (size - sample_bytes) * i // (num_samples - 1)))
            digest.update(stream.read(sample_bytes))
    return digest.digest()


def cache_folder() -> Path:
    """Where conversions are kept: $BATCHLOOM_CACHE, else batchloom/ in the user's cache folder."""
    if "BATCHLOOM_CACHE" in os.environ:
        return Path(os.environ["BATCHLOOM_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchloom"


def _converted_gguf(file: Path) -> Path:
    """The GGUF file as a folder of float32 safetensors with its tokenizer: loading that takes a tenth of the time."""
    identity = hashlib.sha256(f"{_CONVERTER_VERSION}\0{file.stat().st_size}\0".encode() + _weight_sample(file))
    target = cache_folder() / f"{file.stem}-{identity.hexdigest()[:16]}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        _convert_gguf(file, scratch)
        os.replace(scratch, target)
    except ImportError as error:
        raise ModelError(
            f"model {str(file)!r}: reading GGUF files needs `pip install 'batchloom[gguf]'`: {error}"
        ) from error
    except OSError as error:
        if not (target / "config.json").is_file():  # else another process converted it meanwhile
            raise ModelError(f"model {str(file)!r}: cannot be converted: {error}") from error
    except Exception as error:  # the parsers raise whatever a damaged file leads them to
        raise ModelError(f"model {str(file)!r}: not a readable GGUF file: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert_gguf(file: Path, folder: Path) -> None:
    import torch
    import transformers

    # Newer transformers keep GGUF weights packed unless told otherwise; older ones always unpack them.
    unpack = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    # GGUF holds weights of 4 to 8 bits with scales; float32 keeps each product of the two exactly enough for parity.
    with no_progress_bars():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, **unpack
        )
        model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keeps transformers from drawing bars of its own for the length of the block."""
    from transformers.utils import logging

    is_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_enabled:
            logging.enable_progress_bar()


def _hub_snapshot(model: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json", *_TOKENIZER_FILES]
    try:
        folder = Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:  # offline, no such repository, no permission: the library's message says which
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"model {model!r}: neither a local checkpoint nor a hub id that can be fetched: {first_line}"
        ) from error
    return resolve_checkpoint(folder)


SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Each is held to transformers' own `generate` by tests/parity."""


def check_supported(config: "PretrainedConfig") -> None:
    """Refuses by name what has not been proven exact.

    Raises:
        ModelError: the architecture, logit soft-capping, or a changing rotary base.
    """
    name = config.model_type
    if name not in SUPPORTED_MODEL_TYPES:
        raise ModelError(f"architecture {name!r} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if layer_types - {"full_attention", "sliding_attention"}:
        raise ModelError(f"architecture {name!r}: layer types {sorted(layer_types)} are not supported")
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if getattr(config, cap, None):
            raise ModelError(f"architecture {name!r} with {cap}={getattr(config, cap)} is not supported")
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise ModelError(f"rotary embedding of type {rope_type!r} depends on the batch and is not supported")
