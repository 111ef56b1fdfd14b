"""A checkpoint's sentence-transformers files: how tokens are pooled to one vector, and the prompts before texts.

The files: modules.json, which lists the modules; a folder with config.json for each; config_sentence_transformers.json
for prompts; sentence_bert_config.json, or that of another family, for the longest text. All may be missing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model.loading.checkpoint import read_json
from engine.model.loading.config_sizes import find_size

POOLINGS = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
"""Poolings by their sentence-transformers names, in the order in which several are concatenated."""

_OLD_NAMES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}

_ACTIVATIONS = ("Tanh", "Identity", "ReLU", "GELU", "Sigmoid", "SiLU")
"""Classes of torch.nn that a Dense module may name."""


_FAMILIES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
"""In the names of the file about texts, in the order in which sentence-transformers looks for it."""

_ARGUMENTS = (
    *("processing_kwargs", "processor_kwargs", "tokenizer_args"),
    *("config_kwargs", "config_args", "model_kwargs", "model_args"),
)
"""Keys of the file about texts that hold arguments by which sentence-transformers makes tokens or the model."""

_NEUTRAL_ARGUMENTS = {"trust_remote_code", "attn_implementation", "dtype", "torch_dtype"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseFiles:
    """A linear layer after the pooling: a safetensors file with linear.weight ``[out, in]`` and optionally linear.bias,
    an activation's class name in torch.nn, and the length of its output."""

    weights: Path
    activation: str
    num_outputs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceFiles:
    """Made by `read_sentence_files`.

    Attributes:
        poolings: of `POOLINGS`; several are concatenated to one vector.
        dense: layers after the pooling, in order.
        is_normalized: whether embeddings are divided by their Euclidean norm.
        num_dimensions: length of an embedding before it is cut.
        default_dimensions: length that embeddings are cut to by default; None: not cut.
        prompts: name to the text that is put before each text.
        default_prompt: name of the prompt that is used by default; None: no prompt.
        pools_prompt: whether the prompt's tokens are pooled, too.
        max_tokens: longest text in tokens, special tokens included; None where the model's context is the limit.
    """

    poolings: tuple[str, ...]
    dense: tuple[DenseFiles, ...] = ()
    is_normalized: bool = False
    num_dimensions: int
    default_dimensions: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    pools_prompt: bool = True
    max_tokens: int | None = None


def read_sentence_files(folder: Path) -> SentenceFiles:
    """How a checkpoint makes embeddings; `ModelError` if a file cannot be read or lacks the hidden size, or names a
    module or a setting that is not computed here. Without modules.json the defaults of sentence-transformers apply: the
    mean of an encoder's tokens, the last token of a causal model, not normalised."""
    config = read_json(folder / "config.json")
    modules = _list_modules(folder)
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Dense", "Normalize"}:
        raise ModelError(
            f"{folder / 'modules.json'}: the modules are {', '.join(kinds)}; supported are Transformer, Pooling and "
            "then any of Dense and Normalize"
        )
    if "Normalize" in kinds[:-1]:
        raise ModelError(f"{folder / 'modules.json'}: Normalize is supported as the last module")
    pooling = _read_if_there(modules[1][1] / "config.json") if modules[1][1] != folder else {}
    dense = tuple(_read_dense(place) for kind, place in modules if kind == "Dense")
    poolings = _find_poolings(pooling, config, modules[1][1])
    names = [folder / f"sentence_{family}_config.json" for family in _FAMILIES]
    about_texts = next(filter(Path.exists, names), names[0])
    texts = _read_if_there(about_texts)
    if why := _why_not_texts(texts):
        raise ModelError(f"{about_texts}: {why} is not supported")
    settings = _read_if_there(folder / "config_sentence_transformers.json")
    return SentenceFiles(
        poolings=poolings,
        dense=dense,
        is_normalized=kinds[-1] == "Normalize",
        num_dimensions=dense[-1].num_outputs if dense else find_size(config, "hidden_size") * len(poolings),
        default_dimensions=settings.get("truncate_dim"),
        prompts=settings.get("prompts") or {},
        default_prompt=settings.get("default_prompt_name"),
        pools_prompt=bool(pooling.get("include_prompt", True)),
        max_tokens=texts.get("max_seq_length"),
    )


def _why_not_texts(texts: Mapping[str, Any]) -> str | None:
    """What a file says about texts that is not computed here."""
    if texts.get("do_lower_case"):
        return "do_lower_case"
    if (task := texts.get("transformer_task", "feature-extraction")) != "feature-extraction":
        return f"transformer_task {task!r}"
    if "message" in (texts.get("modality_config") or {}):
        return "modality_config with message, by which texts are put into the chat template,"
    for name in _ARGUMENTS:
        if set(texts.get(name) or {}) - _NEUTRAL_ARGUMENTS:
            return f"{name} {texts[name]}"
    return None


def check_causal_pooling(files: SentenceFiles, folder: Path) -> None:
    """Refuses a pooling of other tokens than the last: those of a shared prefix are not available."""
    if files.poolings != ("lasttoken",):
        raise ModelError(
            f"{folder}: pooling {' and '.join(files.poolings)} of a causal model is not supported, only lasttoken"
        )


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _list_modules(folder: Path) -> list[tuple[str, Path]]:
    """Class name and folder of each module, in order."""
    path = folder / "modules.json"
    if not path.exists():
        return [("Transformer", folder), ("Pooling", folder)]
    try:
        listed = json.loads(path.read_bytes())
        modules = [(module["type"].rpartition(".")[2], folder / module["path"]) for module in listed]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} cannot be read: {error!r}") from error
    if modules and modules[0][1] != folder:
        raise ModelError(f"{path}: the Transformer module is in {modules[0][1].name!r}; supported is the folder itself")
    return modules


def _find_poolings(pooling: Mapping[str, Any], config: Mapping[str, Any], place: Path) -> tuple[str, ...]:
    if "pooling_mode" in pooling:
        named = pooling["pooling_mode"]
        found = (named,) if isinstance(named, str) else tuple(named)
    else:
        found = tuple(name for key, name in _OLD_NAMES.items() if pooling.get(key))
    if not pooling:
        is_causal = any(name.endswith("ForCausalLM") for name in config.get("architectures") or ())
        found = ("lasttoken",) if is_causal else ("mean",)
    unknown = [name for name in found if name not in POOLINGS]
    if unknown or not found:
        raise ModelError(f"{place / 'config.json'}: pooling must be of {', '.join(POOLINGS)}, got {list(found)}")
    return found


def _read_dense(place: Path) -> DenseFiles:
    config = read_json(place / "config.json")
    activation = str(config.get("activation_function", "torch.nn.modules.activation.Tanh"))
    name = activation.rpartition(".")[2]
    if not activation.startswith("torch.nn.") or name not in _ACTIVATIONS:
        raise ModelError(f"{place / 'config.json'}: activation_function {activation!r} is not supported")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key, "sentence_embedding") not in ("sentence_embedding", None):
            raise ModelError(f"{place / 'config.json'}: {key} {config[key]!r} is not supported")
    if config.get("use_residual"):
        raise ModelError(f"{place / 'config.json'}: use_residual is not supported")
    weights = place / "model.safetensors"
    if not weights.is_file():
        raise ModelError(f"{place} holds no model.safetensors")
    num_outputs = config.get("out_features")
    if type(num_outputs) is not int or num_outputs < 1:
        raise ModelError(f"{place / 'config.json'}: out_features must be a positive whole number, got {num_outputs!r}")
    return DenseFiles(weights=weights, activation=name, num_outputs=num_outputs)
