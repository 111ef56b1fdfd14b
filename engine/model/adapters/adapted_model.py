"""A model with a LoRA adapter merged into its weights, and optionally the base weights, to switch adapters."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.decoder_layer import LayerWeights
from engine.model.adapters.adapter import Adapter, check_type
from engine.model.adapters.lora import Base, Update, find_updates, merge, restore
from engine.model.model import Model


class AdaptedModel(Model):
    """A model whose layers get the adapter's updates as the backend reads them, always from the base weights. Made by
    `AdaptedModel.load_with`. With `keeps_base` these stay in memory, so that `use_adapter` may be called."""

    def __init__(self, language_model: transformers.PreTrainedModel, **arguments: Any) -> None:
        super().__init__(language_model, **arguments)
        self.keeps_base = False
        self._language_model: transformers.PreTrainedModel | None = language_model
        self._layers: nn.ModuleList = self.base.layers
        self._layers_name = next(name for name, part in language_model.named_modules() if part is self._layers)
        self._updates: dict[str, Update] = {}
        self._replaced_weights: Base = []

    @classmethod
    def load_with(
        cls, adapter: Adapter | None, source: Path | transformers.PreTrainedModel, *, keeps_base: bool, **how: Any
    ) -> "AdaptedModel":
        """A model with an adapter; None: the base without changes. See `Model.load`; also raises `ModelError` where
        the adapter cannot be read, or does not fit the model."""
        if adapter is not None:
            check_type(adapter)
        made = cls.load(source, **how)
        assert isinstance(made, cls), "load returns an instance of the class it is called on"
        made.keeps_base = keeps_base
        made._owns_weights = made._owns_weights and not keeps_base
        made._choose(adapter)
        return made

    @torch.inference_mode()
    def use_layers_of(self, backend: AttentionBackend) -> None:
        super().use_layers_of(backend)
        if not self.has_replaced_layers:
            self._merge_stock_layers()
        if not self.keeps_base:
            self._language_model = None  # frees weights that the backend has copied

    @torch.inference_mode()
    def use_adapter(self, adapter: Adapter | None, backend: AttentionBackend) -> None:
        """Switches to another adapter, or to the base where that is None, for the backend whose layers compute the
        model. Raises `ModelError` if it cannot be read, or does not fit the model; the current one stays in use."""
        self._choose(adapter)
        if self.has_replaced_layers:
            del self.base.layers  # beside the base, the device may have no room for both
            layers = backend.make_layers(self._take_layers())
            assert layers is not None, "the backend has made layers before"
            self._join(layers)
        else:
            restore(self._replaced_weights)
            self._merge_stock_layers()

    def _choose(self, adapter: Adapter | None) -> None:
        assert self._language_model is not None, "the base model has been dropped"
        self._updates = {} if adapter is None else find_updates(adapter, self._language_model)
        self.adapter = adapter

    def _merge_stock_layers(self) -> None:
        assert self._language_model is not None, "the base model has been dropped"
        self._replaced_weights = []
        for name, update in self._updates.items():
            replaced = merge(self._language_model, {name: update})
            if self.keeps_base:
                self._replaced_weights += replaced

    def _take_layers(self) -> Iterator[LayerWeights]:
        for index, layer in enumerate(self._layers):
            replaced = merge(layer, self._updates, f"{self._layers_name}.{index}.")
            weights = self._read_layer(layer, index)
            restore(replaced)
            yield weights
            if self._owns_weights:
                self._layers[index] = nn.Identity()
