"""A stock transformers encoder that computes texts of different lengths in one packed batch without padding.

Positions restart with each text, and attention is computed at once for neighbouring texts of equal length, which form a
batch without a copy (Prepacking, section 3: independent masks and restarting positions in one batch).
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AutoModel, AutoModelForSequenceClassification

from engine.device.transfers import to_device
from engine.encoding.families import ENCODERS, first_position
from engine.encoding.packed_linear import pack_linears
from engine.errors import ModelError
from engine.model.adapters.adapter import Adapter, check_type
from engine.model.loading.checkpoint import check_layers
from engine.model.loading.other_weights import refuse_missing
from engine.model.loading.stock_weights import read_config, read_pretrained
from engine.model.stock_attention import refuse_unless_neutral
from engine.pooling.class_labels import ClassLabels
from engine.pooling.pooler import EmbeddingPooler, Pooler, class_logprobs, pool
from engine.pooling.sentence_files import read_sentence_files
from engine.request import Mode

ATTENTION_NAME = "batchloom_encoder"

WINDOW_ROWS = 256
"""Query rows that are computed together in a layer with a sliding window."""

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "dropout": (0.0,),
    "is_causal": (False,),
    "softcap": (0.0,),
    "use_cache": (False,),
    "output_attentions": (False,),
    "deterministic": (True, False),
}
"""Values of keywords that change nothing. For any other keyword only None is accepted."""


TextRuns = tuple[tuple[int, int], ...]
"""The lengths of a step's texts: (number of texts, tokens of each) for each run of neighbours of equal length."""


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    text_runs: TextRuns,
    sliding_window: int | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: each text attends to itself, in both directions. Raises `ModelError` if the
    model passes an option that is not supported.

    Args:
        query: ``[1, num_q_heads, T, head_dim]``.
        key, value: ``[1, num_kv_heads, T, head_dim]``.
        attention_mask: None; `text_runs` takes its place and says which rows belong to which text.
        sliding_window: a token sees those at smaller distances than this, on both sides; None: all.
    """
    refuse_unless_neutral(keywords | {"attention_mask": attention_mask}, _NEUTRAL)
    out = torch.empty_like(query[0].transpose(0, 1))
    first = 0
    for num_texts, length in text_runs:
        rows = slice(first, first + num_texts * length)
        q, k, v = (
            states[0, :, rows].view(-1, num_texts, length, states.shape[-1]).transpose(0, 1)
            for states in (query, key, value)
        )
        found = _attend_windowed(q, k, v, scaling, sliding_window) if sliding_window else _attend(q, k, v, scaling)
        out[rows] = found.transpose(1, 2).flatten(0, 1)
        first = rows.stop
    return out.unsqueeze(0), None


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    is_grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=is_grouped)


def _attend_windowed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, window: int
) -> torch.Tensor:
    """``[n, heads, length, head_dim]``, block by block of query rows."""
    length = query.shape[2]
    if length <= window:
        return _attend(query, key, value, scale)
    blocks = []
    for start in range(0, length, WINDOW_ROWS):
        end = min(start + WINDOW_ROWS, length)
        first, last = max(0, start - window + 1), min(length, end + window - 1)
        places = torch.arange(first, last, device=query.device)
        mask = (places[start - first : end - first, None] - places).abs() < window
        blocks.append(_attend(query[:, :, start:end], key[:, :, first:last], value[:, :, first:last], scale, mask))
    return torch.cat(blocks, dim=2)


AttentionInterface.register(ATTENTION_NAME, attend)
# No mask function is registered under this name, so transformers makes no mask.


class Encoder:
    """A loaded encoder on one device.

    Attributes:
        vocab_size: token ids are below it.
    Args:
        model: the encoder, or its `...ForSequenceClassification`; switched to this attention.
    Raises:
        ModelError: the encoder is not supported.
    """

    def __init__(self, model: transformers.PreTrainedModel, folder: Path) -> None:
        self._model = model.eval()
        self._base = model.base_model
        self._folder = folder
        self._first_position = first_position(model.config)
        self._takes_types = getattr(model.config, "type_vocab_size", 0) > 1
        self._poolers: dict[Mode, Pooler] = {}
        self.vocab_size = int(model.config.vocab_size)
        self.device, self.dtype = model.device, model.dtype
        model.set_attn_implementation(ATTENTION_NAME)
        pack_linears(self._base)

    @classmethod
    def load(
        cls, folder: Path, *, dtype: torch.dtype, device: torch.device, adapter: Adapter | None = None
    ) -> "Encoder":
        """Reads a checkpoint directly onto the device, with its classification head if it has one.

        Args:
            dtype: of weights and computation.
        Raises:
            ModelError: not readable, of an unsupported architecture, or an adapter of another model.
        """
        if adapter is not None:
            check_type(adapter)
        config = read_config(folder)
        if config.model_type not in ENCODERS or getattr(config, "is_decoder", False):
            raise ModelError(f"architecture {config.model_type!r} is not an encoder that is supported")
        check_layers(folder)
        has_head = any(name.endswith("ForSequenceClassification") for name in config.architectures or ())
        kind = AutoModelForSequenceClassification if has_head else AutoModel
        model, missing = read_pretrained(kind, folder, config, dtype=dtype, device=device)
        # An embedding does not use the pooler of a model without a head, and many checkpoints lack it.
        refuse_missing({name for name in missing if not name.startswith("pooler.")}, folder)
        if adapter is not None:
            from engine.model.adapters.lora import find_updates, merge  # imported only when needed

            with torch.inference_mode():
                merge(model, find_updates(adapter, model))
        return cls(model, folder)

    def find_pooler(self, mode: Mode) -> Pooler:
        """The pooler for a mode; raises `ModelError` where the checkpoint has none."""
        if mode not in self._poolers:
            if mode == "classify":
                labels = ClassLabels.read(self._folder)
                labels.check_head(self._folder, int(self._model.config.num_labels))
                self._poolers[mode] = EncoderClassPooler(self._model, labels)
            else:
                self._poolers[mode] = EmbeddingPooler(read_sentence_files(self._folder), self.device)
        return self._poolers[mode]

    @torch.inference_mode()
    def forward(self, texts: Sequence[np.ndarray[Any, np.dtype[np.int32]]], separator: int | None) -> torch.Tensor:
        """Last hidden states of the texts' tokens, ``[T, hidden]``.

        Args:
            texts: int32 token ids with special tokens; fastest where texts of equal length are neighbours.
            separator: see `engine.Request.pair_separator`.
        """
        lengths = [len(text) for text in texts]
        positions = np.concatenate([np.arange(length) for length in lengths]) + self._first_position
        numbers = to_device(np.stack([np.concatenate(texts).astype(np.int64), positions]), self.device)
        inputs: dict[str, Any] = {"input_ids": numbers[:1], "position_ids": numbers[1:]}
        if self._takes_types and separator is not None:
            types = np.concatenate([np.cumsum(text == separator) - (text == separator) > 0 for text in texts])
            inputs["token_type_ids"] = to_device(types.astype(np.int64), self.device).unsqueeze(0)
        text_runs = tuple((len(list(same)), length) for length, same in groupby(lengths))
        hidden: torch.Tensor = self._base(**inputs, text_runs=text_runs).last_hidden_state[0]
        return hidden


class EncoderClassPooler:
    """The classification head of an encoder, as its family has it: a `...ForSequenceClassification`."""

    def __init__(self, model: transformers.PreTrainedModel, labels: ClassLabels) -> None:
        self._model: Any = model
        self._prepare = ENCODERS[model.config.model_type].prepare
        self._pooling = getattr(model.config, "classifier_pooling", "cls")
        self._is_exclusive, self.num_values = labels.is_exclusive, int(model.config.num_labels)

    @torch.inference_mode()
    def __call__(self, hidden: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        pooled = pool(hidden, lengths, self._pooling).to(hidden.dtype)
        logits = self._model.classifier(self._prepare(self._model, pooled)).float()
        return class_logprobs(logits, is_exclusive=self._is_exclusive)
