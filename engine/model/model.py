"""A causal LM whose layers or attention the engine computes: our own modules for plain models, else transformers'."""

import copy
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from engine.device.placement import give_back_freed_memory
from engine.device.transfers import to_device
from engine.kernels.attention_backend import AttentionBackend, OutputLayer
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights
from engine.kernels.draw import draw_tokens
from engine.kernels.torch_output_layer import TorchOutputLayer, largest_logits
from engine.kv.kv_cache import KVCache, KVShape
from engine.model.attention_step import AttentionStep
from engine.model.layer_windows import find_kept_windows
from engine.model.layers import ReplacedLayers, TiedEmbedding, read_weights
from engine.model.loading.checkpoint import find_eos_token_ids, is_plain
from engine.model.pending_tokens import fill_in
from engine.model.plain.plain_checkpoint import load_plain, read_plain_config
from engine.model.plain.plain_model import Embedding, PlainModel
from engine.scheduling.token_batch import TokenBatch

if TYPE_CHECKING:
    import transformers

    from engine.model.adapters.adapter import Adapter
    from engine.model.shard import Shard

LOGGER = logging.getLogger("batchloom.engine")


class Model:
    """A loaded checkpoint on one device, with no state between steps. It frees what it packs if it `owns_weights`.

    Attributes:
        base: the model without its output layer; its layers may be replaced by one module of the backend.
        adapter: merged into the weights; None: none.
        shard: the rank whose share of the model this is; None: the model is whole.
        settings: of the text model, as in config.json.
        max_positions: longest sequence that the checkpoint allows.
        has_plain_layers, has_own_layers: whether the layers of every backend, or of this device's, support the model.
        has_output_layer: whether the checkpoint has one; else the model can only be pooled.
        read_layer, join_layers, finish_logits: how the family's layers are read, joined into one module, and how its
            logits are scaled or capped.
        draw_tokens: the backend's `engine.kernels.draw.draw_tokens`.
    """

    def __init__(
        self,
        language_model: "transformers.PreTrainedModel | PlainModel",
        *,
        device: torch.device,
        owns_weights: bool,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        config = language_model.config.get_text_config(decoder=True)
        self.settings: dict[str, Any] = config.to_dict()
        self.base = language_model.get_decoder()
        self._head: Any = language_model.get_output_embeddings()
        self._output_layer: OutputLayer
        self.draw_tokens = draw_tokens
        self.adapter: Adapter | None = None
        self.shard: Shard | None = None
        self.device = device
        self.dtype: torch.dtype = language_model.dtype
        self.vocab_size = int(config.vocab_size)
        self.hidden_size = int(config.hidden_size)
        self.num_q_heads = int(config.num_attention_heads)
        self.kv_shape = kv_shape_of(config, kv_dtype or self.dtype)
        self.has_plain_layers = is_plain(self.settings)
        self._norm: Any = getattr(self.base, "norm", None)
        self.max_positions = int(config.max_position_embeddings)
        self.finish_logits: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.read_layer: Callable[[Any, int], LayerWeights] = read_weights
        self.join_layers: Callable[[DecoderLayers], nn.Module] = ReplacedLayers
        if not self.has_plain_layers:
            from engine.model.stock_model import adapt  # imported only when needed

            adapt(self, language_model)
        self.has_own_layers = self.has_plain_layers or self.join_layers is not ReplacedLayers
        self.weight_bytes = sum(parameter.nbytes for parameter in language_model.parameters())
        self.eos_token_ids = find_eos_token_ids(language_model)
        self.is_compiled = False
        self.has_output_layer = True
        self.has_replaced_layers = False
        self._owns_weights = owns_weights
        if not isinstance(language_model, PlainModel):
            from engine.model.stock_attention import ATTENTION_NAME

            language_model.set_attn_implementation(ATTENTION_NAME)

    @classmethod
    def load(
        cls, source: "Path | transformers.PreTrainedModel", *, dtype: torch.dtype, device: torch.device
    ) -> "Model":
        """Reads a checkpoint onto the device; a loaded model is moved there and switched to our attention.

        Args:
            source: a folder of `resolve_checkpoint`, or a loaded model.
            dtype: of weights, KV and computation. For 8-bit formats `use_layers_of` converts bfloat16 weights. Those of
                layers are on the host until then, since a GPU may have no room for them.
        Raises:
            ModelError: not readable.
        """
        kv_dtype, place = dtype, device
        if dtype.itemsize == 1:
            dtype, place = torch.bfloat16, torch.device("cpu")
        if isinstance(source, Path) and (plain := read_plain_config(source)) is not None:
            loaded, has_output_layer = load_plain(source, plain, dtype=dtype, device=place)
        else:
            from engine.model.stock_model import load_stock  # seconds to import

            loaded, has_output_layer = load_stock(source, dtype=dtype, device=place)
        if place != device:
            parts = [part for name, part in loaded.get_decoder().named_children() if name != "layers"]
            for part in (*parts, loaded.get_output_embeddings()):
                part.to(device)
        made = cls(loaded, device=device, owns_weights=isinstance(source, Path), kv_dtype=kv_dtype)
        made.has_output_layer = has_output_layer
        return made

    @torch.inference_mode()
    def use_layers_of(self, backend: AttentionBackend) -> None:
        """Replaces the model's layers and output layer by those of the backend, if it has any for this model;
        `ModelError` if a layer has a parameter that these do not compute with."""
        self.draw_tokens = backend.draw_tokens
        layers = backend.make_layers(self._take_layers()) if self.has_own_layers else None
        head, self._head = self._head, None  # so that its memory is freed if the backend copies the weights
        output_layer = None if layers is None else backend.make_output_layer(head.weight, head.bias)
        if output_layer is None:
            self._output_layer = TorchOutputLayer(head)
        if layers is None:
            if not self.has_plain_layers:
                LOGGER.info("transformers' own layers compute this model, with attention %s", backend.name)
            return
        # A shallow copy, so that a model object of the caller keeps its own layers.
        self.base = copy.copy(self.base)
        self.base._modules = dict(self.base._modules)
        self._join(layers)
        if output_layer is not None:
            self._output_layer, embedding = output_layer, self.base.embed_tokens
            if self._owns_weights and head.weight is embedding.weight and type(embedding) in (nn.Embedding, Embedding):
                self.base.embed_tokens = TiedEmbedding(output_layer)
        give_back_freed_memory()
        torch.cuda.empty_cache()  # frees the weights that were copied; does nothing on a CPU

    def _take_layers(self) -> Iterator[LayerWeights]:
        """The weights of each layer. If this model owns them, a layer is freed once the next one is asked for."""
        layers = self.base.layers
        for index, layer in enumerate(layers):
            yield self._read_layer(layer, index)
            if self._owns_weights:
                layers[index] = nn.Identity()

    def _read_layer(self, layer: Any, index: int) -> LayerWeights:
        """The weights of a layer; the last of plain ones has the final norm."""
        read = self.read_layer(layer, index)
        is_last = index == self.kv_shape.num_layers - 1
        return replace(read, final_norm=self._norm.weight) if self.has_plain_layers and is_last else read

    def _join(self, layers: DecoderLayers) -> None:
        """Puts the backend's layers in place of the model's."""
        self.base.layers = nn.ModuleList([self.join_layers(layers)])
        if self.has_plain_layers:
            self.base.norm = nn.Identity()
        self.has_replaced_layers = True

    @torch.inference_mode()
    def forward(
        self,
        batch: TokenBatch,
        cache: KVCache,
        backend: AttentionBackend,
        pending_token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Computes one token batch and writes its KV. Returns last hidden states ``[R, hidden]`` of batch.output_rows,
        before the output layer.

        Args:
            pending_token_ids: int64, tokens sampled by the previous step, which are still on the device.
        """
        arrays = batch.input_ids, batch.positions, batch.output_rows
        joined = to_device(np.concatenate(arrays), self.device)  # one transfer
        input_ids, positions, output_rows = torch.split(joined, [len(array) for array in arrays])
        if batch.has_pending_tokens:
            input_ids = fill_in(input_ids, pending_token_ids, self.shard)
        works = [backend.prepare(attention) for attention in (batch.attention, *batch.more_attention)]
        step = AttentionStep(backend=backend, cache=cache, works=works, output_rows=output_rows)
        return self.compute(input_ids, positions, step)

    @torch.inference_mode()
    def compute(self, input_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """The part of `forward` on the device, which a CUDA graph can capture: it never waits for the device, and its
        launches do not depend on the contents of tensors. Returns last hidden states ``[R, hidden]`` of the step's
        output rows, or of all.

        Args:
            input_ids, positions: int64 ``[T]``.
        """
        inputs: dict[str, Any] = {"use_cache": False, "attention_step": step}
        inputs |= {"input_ids": input_ids.unsqueeze(0), "position_ids": positions.unsqueeze(0)}
        if self.is_compiled:
            from engine.model.compiling import compute_compiled

            hidden = compute_compiled(self, inputs)
        else:
            hidden = self.base(**inputs).last_hidden_state
        if self.has_replaced_layers or step.output_rows is None:
            return hidden[0]
        return hidden[0].index_select(0, step.output_rows)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The output layer: ``[R, hidden]`` -> float32 ``[R, vocab_size]``."""
        logits = self._output_layer.logits(hidden).float()
        return logits if self.finish_logits is None else self.finish_logits(logits)

    @torch.inference_mode()
    def most_likely(self, hidden: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """``[R, hidden]`` -> int64 ``[R]``: see `OutputLayer.most_likely`."""
        if self.finish_logits is not None:  # a cap can round different logits to equal ones
            return largest_logits(hidden, self.logits, allowed)
        return self._output_layer.most_likely(hidden, allowed)

    @torch.inference_mode()
    def label_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits of the given tokens only: ``[R, hidden]``, int64 ``[n]`` -> float32 ``[R, n]``."""
        logits = self._output_layer.label_logits(hidden, token_ids)
        return (logits if self.finish_logits is None else self.finish_logits(logits)).float()


def kv_shape_of(config: Any, dtype: torch.dtype) -> KVShape:
    """The KV shape of a text model with this config."""
    windows = find_kept_windows(config.to_dict()) if getattr(config, "sliding_window", None) else ()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVShape(
        num_layers=int(config.num_hidden_layers),
        num_kv_heads=int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads),
        head_dim=int(head_dim),
        dtype=dtype,
        windows=windows,
    )
