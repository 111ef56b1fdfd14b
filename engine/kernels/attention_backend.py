"""The interfaces between the model and its attention backend."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights
from engine.kernels.scoring import Scoring


class OutputLayer(Protocol):
    """The linear layer from hidden states ``[R, hidden]`` to the vocabulary."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, vocab_size]`` in the dtype of the weights; float32 for int8 weights."""

    def most_likely(self, hidden: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """The arg max of the logits, the lowest token id on ties: int64 ``[R]``.

        Args:
            allowed: int32 ``[R, ceil(vocab_size / 32)]``: token t may be chosen if bit t % 32 of word t // 32 is set,
                at least one in each row. None: all.
        """

    def label_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """The logits of the tokens int64 ``[n]`` only: ``[R, n]`` in float64; float32 for int8 weights."""

    def weights_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The weights of these tokens: int64 ``[...]`` -> ``[..., hidden]``."""


class AttentionBackend(Protocol):
    """Attention over paged KV for one model on one device: `prepare` once per step, then write and attend per layer.

    Backends on a CPU inherit the methods with a body.
    """

    @property
    def name(self) -> str:
        """The value of `EngineConfig.attention` that selects it."""

    @property
    def graphable(self) -> Any:
        """The backend itself, a `TritonAttention`, if CUDA graphs can capture its launches, else None."""
        return None

    def scratch_bytes(self, num_rows: int) -> int:
        """Upper bound of the GPU scratch memory of a step of num_rows tokens."""
        return 0

    def make_layers(self, weights: Iterable[LayerWeights]) -> DecoderLayers | None:
        """The backend's decoder layers, of a model that they support; None if it computes only attention, or at the
        first layer, if it has a size that they do not support."""
        return None

    def make_output_layer(self, weight: torch.Tensor, bias: torch.Tensor | None) -> OutputLayer | None:
        """The backend's output layer; None if it has none for this shape."""
        return None

    def draw_tokens(self, logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """See `engine.kernels.draw.draw_tokens`."""

    def prepare(self, batch: AttentionBatch) -> Any:
        """Converts a step's description, once, into what every layer of the step reads."""

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, work: Any
    ) -> None:
        """Writes the keys and values of a step's tokens into their slots of the caches.

        Args:
            key, value: ``[T, num_kv_heads, head_dim]``, of the step's tokens in row order.
            k_cache, v_cache: one layer's, ``[num_blocks, block_size, num_kv_heads, head_dim]``; written in place.
            work: what `prepare` returned.
        """
        for cache, rows in ((k_cache, key), (v_cache, value)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, work.slots, rows)

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, work: Any, scoring: Scoring
    ) -> torch.Tensor:
        """Attention of a whole token batch: ``[T, num_q_heads, head_dim]``.

        Args:
            query: ``[T, num_q_heads, head_dim]``, in row order.
            k_cache, v_cache, work: as in `write_kv`, which has written this step's tokens.
        """
