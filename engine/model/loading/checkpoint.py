"""The files of a checkpoint: a folder, a GGUF file, or a hub id's snapshot; and which architectures are plain."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.errors import ModelError

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "sentencepiece.bpe.model"),
    *("vocab.json", "vocab.txt", "merges.txt", "added_tokens.json", "special_tokens_map.json"),
    *("chat_template.jinja", "chat_template.json", "tekken.json"),
)

GGUF_TENSORS = "gguf_tensors.json"
"""File in the folder of a GGUF file: the GGUF file's path, and a table of its tensors."""

QUANT_METHODS = ("compressed-tensors", "awq", "gptq")
"""Methods of safetensors files whose weights may stay quantized."""

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings"),
)
_POSITIVE = ("rms_norm_eps", "rope_theta", "factor", "low_freq_factor", "high_freq_factor")

_LAYER = re.compile(
    r"(?:(?:model|language_model|text_model|decoder)\.)*(?:layers|encoder\.layers|(?:\w+\.)?(?:encoder|transformer)\.layer)\.(\d+)\."
)
"""Names of the weights of a decoder's or encoder's layers; a model of images and text has others beside them."""


def resolve_checkpoint(model: str | Path) -> Path:
    """A local folder with config.json, tokenizer files, and safetensors weights or a GGUF file's table of tensors; that
    of a .gguf file is made once, in the cache folder. Raises `ModelError` if folder, file or hub id are missing, or as
    `check_numbers`."""
    path = Path(os.path.expanduser(model))  # where there is no such user, the path stays as it is
    if path.is_dir():
        if not (path / "config.json").is_file():
            hint = "".join(f"; to use its GGUF file, name {file}" for file in sorted(path.glob("*.gguf"))[:1])
            raise ModelError(f"model {str(model)!r}: the folder holds no config.json{hint}")
        files = {file.name for file in path.glob("*.safetensors")} - {"adapter_model.safetensors"}
        if not files and not (path / GGUF_TENSORS).is_file():
            raise ModelError(f"model {str(model)!r}: the folder holds no *.safetensors file of a model")
        check_numbers(path)
        return path
    from engine.model.loading.hub import hub_snapshot, open_file  # imported only when needed

    return open_file(model) if path.is_file() else hub_snapshot(str(model))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; raises `ModelError` if there is none."""
    try:
        values = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold an object, got {type(values).__name__}")
    return values


def check_numbers(folder: Path) -> None:
    """Refuses a config.json with a plain model's size that is no positive whole number, or a number of norms or
    rotations that is not positive; null stands for a default."""
    objects = [read_json(folder / "config.json")]
    for values in objects:
        objects += [value for value in values.values() if isinstance(value, dict)]
        sizes = {*SIZES, "head_dim"} if values.get("model_type") in PLAIN_MODEL_TYPES else set()
        for name in [name for name in values if name in sizes or name in _POSITIVE]:
            value, kinds = values[name], (int,) if name in sizes else (int, float)
            if value is not None and (type(value) not in kinds or not 0 < value < math.inf):
                what = f"must be a positive {'whole ' * (name in sizes)}number, got {value!r}"
                raise ModelError(f"model {str(folder)!r}: config.json: {name} {what}")


def is_quantized(folder: Path) -> bool:
    """Whether a checkpoint has quantized weights, which dtype "quantized" may support."""
    found = read_json(folder / "config.json").get("quantization_config") or {}
    if not isinstance(found, dict):
        raise ModelError(f"model {str(folder)!r}: config.json: quantization_config must be an object, got {found!r}")
    return (folder / GGUF_TENSORS).is_file() or found.get("quant_method") in QUANT_METHODS


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files with each weight once: model.safetensors, or those that the index names, or else all."""
    if (whole := folder / "model.safetensors").is_file():
        return [whole]
    if (index := folder / "model.safetensors.index.json").is_file():
        if not isinstance(named := read_json(index).get("weight_map"), dict):
            raise ModelError(f"{index} must hold a weight_map with names of files, got {named!r}")
        return sorted({folder / str(name) for name in named.values()})
    return sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))


def weight_shapes(folder: Path) -> dict[str, list[int]]:
    """Names and shapes of the tensors in `weight_files`, from headers; raises `ModelError` where a file is damaged."""
    shapes: dict[str, list[int]] = {}
    for file in weight_files(folder):
        try:
            with file.open("rb"), safe_open(file, framework="np") as tensors:  # whose own error says that it is gone
                shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            cut = f" is damaged or cut at {file.exists() and file.stat().st_size:,} bytes"
            what = file.name + ("" if isinstance(error, PermissionError) else cut)
            raise ModelError(f"model {str(folder)!r}: the weights cannot be read: {what}: {error}") from error
    return shapes


def check_layers(folder: Path) -> dict[str, list[int]]:
    """As `weight_shapes`; raises `ModelError` if there are fewer or more layers than config.json says, too."""
    shapes = weight_shapes(folder)
    config = read_json(folder / "config.json")
    config = text if isinstance(text := config.get("text_config"), dict) else config
    num_layers = config.get("num_hidden_layers", config.get("n_layers"))
    num_more = config.get("num_nextn_predict_layers") or 0  # layers that predict further tokens are not computed
    num_found = max((int(match[1]) + 1 for match in map(_LAYER.match, shapes) if match), default=None)
    if num_found and isinstance(num_layers, int) and not num_layers <= num_found <= num_layers + num_more:
        why = f"config.json says num_hidden_layers {num_layers}, the weight files hold {num_found} layers"
        raise ModelError(f"model {str(folder)!r}: {why}")
    return shapes


def is_plain_chat(folder: Path) -> bool:
    """Whether config.json and the names of files tell a plain model with output layer, tokenizer and chat template."""
    config, files = read_json(folder / "config.json"), {file.name for file in folder.iterdir()}
    has_text = is_plain(config) and config.get("tie_word_embeddings") is True
    return has_text and files >= {"tokenizer.json", "chat_template.jinja"}


def checkpoint_digest(folder: Path) -> str:
    """Identity of a checkpoint: sha256 over configuration and tokenizer files, and sizes and samples of all weights."""
    digest = hashlib.sha256()
    if (folder / GGUF_TENSORS).is_file():
        from engine.model.loading.gguf import gguf_digest  # imported only when needed

        return gguf_digest(folder)
    for file in sorted(folder.iterdir()):
        if file.name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
            digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
        elif file.suffix == ".safetensors":
            digest.update(f"{file.name}\0{file.stat().st_size}\0".encode() + weight_sample(file))
    if (folder / "modules.json").is_file():
        from engine.model.loading.hub import SENTENCE_FILES  # imported only when needed

        for file in (file for pattern in SENTENCE_FILES for file in sorted(folder.glob(pattern))):
            digest.update(f"{file.relative_to(folder)}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def weight_sample(file: Path, starts: Iterable[int] = ()) -> bytes:
    """Digest of a weight file's beginning, of evenly spread samples, and of bytes on both sides of each place where a
    tensor starts, which a safetensors file's header tells; takes milliseconds for hundreds of tensors."""
    num_samples, sample_bytes, size = 64, 4096, file.stat().st_size
    with file.open("rb") as stream:
        digest = hashlib.sha256(stream.read(1 << 16))
        if file.suffix == ".safetensors":
            starts = _tensor_starts(stream.fileno())
        samples = [((size - sample_bytes) * i // (num_samples - 1), sample_bytes) for i in range(num_samples)]
        samples += [(start - sample_bytes, 2 * sample_bytes) for start in starts if start < size]
        for place, num_bytes in samples:  # the disk reads them at once, not one after the other
            os.posix_fadvise(stream.fileno(), max(0, place), num_bytes, os.POSIX_FADV_WILLNEED)
        for place, num_bytes in samples:
            digest.update(os.pread(stream.fileno(), num_bytes, max(0, place)))
    return digest.digest()


def _tensor_starts(file: int) -> list[int]:
    """Where the tensors of a safetensors file start; nothing where its header is damaged, which loading it will say."""
    size = int.from_bytes(os.pread(file, 8, 0), "little")
    try:
        header = json.loads(os.pread(file, min(size, 100_000_000), 8))  # the format's largest
        return [8 + size + int(tensor["data_offsets"][0]) for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return []


def cache_folder() -> Path:
    """For compiled kernels, converted checkpoints and proofs: $BATCHLOOM_CACHE, else a folder in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "batchloom")
    return Path(os.environ.get("BATCHLOOM_CACHE") or default).expanduser()


PLAIN_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose layers every backend computes; tests compare each with transformers' `generate`."""


def is_plain(config: Mapping[str, Any]) -> bool:
    """Whether every backend's layers compute a model with this config.json; other models are proven before use."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return (
        config.get("model_type") in PLAIN_MODEL_TYPES
        and config.get("hidden_act", "silu") == "silu"
        and not config.get("mlp_bias")
        and config.get("is_causal") is not False
        and isinstance(rope, Mapping)
        and (rope.get("rope_type") or rope.get("type")) in (None, "default", "linear", "llama3", "yarn")
        and all(each.get("partial_rotary_factor") in (None, 1) for each in (config, rope))
    )


def read_end_tokens(folder: Path, name: str = "generation_config.json") -> int | list[int] | None:
    """`eos_token_id` of a JSON file, None where it says none; `ModelError` unless it holds token ids."""
    found = read_json(file).get("eos_token_id") if (file := folder / name).is_file() else None
    if not all(type(token) is int for token in (found if isinstance(found, list) else [found]) if found is not None):
        raise ModelError(f"{file}: eos_token_id must be a token id or a list of them, got {found!r}")
    return found


def find_eos_token_ids(language_model: Any) -> frozenset[int]:
    """Tokens that end an answer: the generation config's, else the config's, else the text model's."""
    config = language_model.config
    places = (getattr(language_model, "generation_config", None), config, config.get_text_config(decoder=True))
    eos = next((eos for place in places if (eos := getattr(place, "eos_token_id", None)) is not None), None)
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def find_tokenizer_ends(folder: Path) -> frozenset[int]:
    """The id of the end-of-sequence token that the tokenizer's files name; empty if they name none."""
    settings = read_json(file) if (file := folder / "tokenizer_config.json").is_file() else {}
    name = end.get("content") if isinstance(end := settings.get("eos_token"), dict) else end
    added = settings.get("added_tokens_decoder", {})
    if not added and (file := folder / "tokenizer.json").is_file():  # which takes longer to read
        added = {token["id"]: token for token in read_json(file).get("added_tokens", ())}
    return frozenset(int(token_id) for token_id, token in added.items() if token["content"] == name)
