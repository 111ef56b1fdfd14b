"""The supported encoders, each compared with transformers and sentence-transformers by a test."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.model.loading.checkpoint import read_json

if TYPE_CHECKING:  # takes seconds to import
    import torch

Head = Callable[[Any, "torch.Tensor"], "torch.Tensor"]
"""A `...ForSequenceClassification` and pooled states ``[n, hidden]`` to logits ``[n, classes]``."""


def _classify_pooled(model: Any, pooled: "torch.Tensor") -> "torch.Tensor":
    logits: torch.Tensor = model.classifier(model.base_model.pooler(pooled.unsqueeze(1)))
    return logits


def _classify_first(model: Any, pooled: "torch.Tensor") -> "torch.Tensor":
    logits: torch.Tensor = model.classifier(pooled.unsqueeze(1))
    return logits


def _classify_rectified(model: Any, pooled: "torch.Tensor") -> "torch.Tensor":
    logits: torch.Tensor = model.classifier(model.pre_classifier(pooled).relu())
    return logits


def _classify_headed(model: Any, pooled: "torch.Tensor") -> "torch.Tensor":
    logits: torch.Tensor = model.classifier(model.head(pooled))
    return logits


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The particulars of one `model_type`.

    Attributes:
        classify: its classification head.
        counts_from_padding: whether positions start after the padding token's id, so that as many fewer tokens fit.
    """

    classify: Head
    counts_from_padding: bool = False


ENCODERS: Mapping[str, Family] = {
    "bert": Family(classify=_classify_pooled),
    "roberta": Family(classify=_classify_first, counts_from_padding=True),
    "xlm-roberta": Family(classify=_classify_first, counts_from_padding=True),
    "camembert": Family(classify=_classify_first, counts_from_padding=True),
    "distilbert": Family(classify=_classify_rectified),
    "electra": Family(classify=_classify_first),
    "modernbert": Family(classify=_classify_headed),
    "nomic_bert": Family(classify=_classify_pooled),
}
"""Encoders by the model_type of config.json."""


def is_encoder(folder: Path) -> bool:
    """Whether a checkpoint is one of these encoders; raises `ModelError` where its config.json cannot be read."""
    return read_json(folder / "config.json").get("model_type") in ENCODERS


def first_position(config: Any) -> int:
    """The position of a text's first token.

    Args:
        config: the model's, or a mapping of config.json's values.
    """
    values = config if isinstance(config, Mapping) else config.to_dict()
    if not ENCODERS[values["model_type"]].counts_from_padding:
        return 0
    return int(values.get("pad_token_id", 1)) + 1
