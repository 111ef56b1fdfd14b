"""What every attention backend offers the model."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights

if TYPE_CHECKING:  # Triton is not installed everywhere that the CPU path runs
    from engine.kernels.triton.triton_attention import TritonAttention


class OutputLayer(Protocol):
    """The linear layer from hidden states ``[R, hidden]`` to the vocabulary."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[R, vocab_size]`` in the dtype of the weights, in int8 in float32."""

    def most_likely(self, hidden: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        """int64 ``[R]``: the token of the largest logit, the first of equals.

        Args:
            allowed: int32 ``[R, ceil(vocab_size / 32)]``: token t may be chosen where bit t % 32 of word t // 32 is
                set; each row has such a token. None: any may.
        """

    def label_logits(self, hidden: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """Only the given columns: int64 ``[n]`` -> ``[R, n]`` in float64, in int8 in float32."""

    def weights_of(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 ``[...]`` -> ``[..., hidden]``."""


class AttentionBackend(Protocol):
    """Attention over paged KV for one model on one device: prepare once a step, then write and attend in each layer."""

    @property
    def name(self) -> str:
        """As in `EngineConfig.attention`."""

    @property
    def graphable(self) -> "TritonAttention | None":
        """Itself, where CUDA graphs can be made of its launches."""

    @property
    def has_final_norm(self) -> bool:
        """Whether its layers end with the norm that follows them in the model (`LayerWeights.final_norm`)."""

    def scratch_bytes(self, num_rows: int) -> int:
        """GPU memory that a step of num_rows tokens takes at most, beyond its results."""

    def make_layers(self, weights: Iterable[LayerWeights]) -> DecoderLayers | None:
        """The backend's own decoder layers; None, with no weights read, where it computes attention alone."""

    def make_output_layer(self, weight: torch.Tensor, bias: torch.Tensor | None) -> OutputLayer | None:
        """The backend's own output layer; None where it has none for this shape."""

    def draw_tokens(self, logits: torch.Tensor, settings: torch.Tensor) -> torch.Tensor:
        """As `engine.kernels.draw.draw_tokens` says."""

    def prepare(self, batch: AttentionBatch) -> Any:
        """What all layers of this step need, made once."""

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, work: Any
    ) -> None:
        """Writes the keys and values of a step's tokens into their slots of the caches.

        Args:
            key, value: ``[T, num_kv_heads, head_dim]``, of the step's tokens in row order.
            k_cache, v_cache: one layer's, ``[num_blocks, block_size, num_kv_heads, head_dim]``; written in place.
            work: what `prepare` returned for this step.
        """

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        work: Any,
        *,
        scale: float,
        softcap: float = 0.0,
        window: int = 0,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a whole token batch: ``[T, num_q_heads, head_dim]``.

        Args:
            query: ``[T, num_q_heads, head_dim]``, in row order.
            k_cache, v_cache: as in `write_kv`; this step's tokens are written already.
            work: what `prepare` returned for this step.
            scale: applied to the scores.
            softcap: c: scores become c * tanh(score / c); 0: they stay.
            window: a row sees this many positions, its own included; 0: all.
            sinks: ``[num_q_heads]``, a score of each head without a value: it takes its share of the weights.
        """
