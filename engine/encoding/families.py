"""The supported encoders, each compared with transformers and sentence-transformers by a test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.model.loading.checkpoint import read_json
from engine.model.loading.config_sizes import find_size

if TYPE_CHECKING:  # takes seconds to import
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The particulars of one `model_type`.

    Attributes:
        prepare: what the `classifier` of a `...ForSequenceClassification` reads, made of the model and of pooled states
            ``[n, hidden]``.
        counts_from_padding: whether positions start after the padding token's id, so that as many fewer tokens fit.
    """

    prepare: Callable[[Any, "torch.Tensor"], Any]
    counts_from_padding: bool = False


_BERT = Family(prepare=lambda model, pooled: model.base_model.pooler(pooled.unsqueeze(1)))
_ELECTRA = Family(prepare=lambda model, pooled: pooled.unsqueeze(1))
_ROBERTA = replace(_ELECTRA, counts_from_padding=True)

ENCODERS: Mapping[str, Family] = {
    **dict.fromkeys(("bert", "nomic_bert"), _BERT),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _ROBERTA),
    "electra": _ELECTRA,
    "distilbert": Family(prepare=lambda model, pooled: model.pre_classifier(pooled).relu()),
    "modernbert": Family(prepare=lambda model, pooled: model.head(pooled)),
}
"""Encoders by the model_type of config.json."""


def is_encoder(folder: Path) -> bool:
    """Whether a checkpoint is one of these encoders; raises `ModelError` where its config.json cannot be read."""
    return read_json(folder / "config.json").get("model_type") in ENCODERS


def find_longest_text(folder: Path) -> int:
    """Longest text in tokens that an encoder's positions allow; `ModelError` if its config.json does not tell it."""
    config = read_json(folder / "config.json")
    return find_size(config, "max_position_embeddings") - first_position(config)


def first_position(config: Any) -> int:
    """The position of a text's first token, by the model's config or a mapping of config.json's values."""
    values = config if isinstance(config, Mapping) else config.to_dict()
    if not ENCODERS[values["model_type"]].counts_from_padding:
        return 0
    return int(values.get("pad_token_id", 1)) + 1
