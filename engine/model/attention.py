"""The attention backends: native or torch on the CPU, Triton on a GPU."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from engine.config import Attention
from engine.device.placement import dtype_name
from engine.errors import ConfigError
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu.native_build import NativeBuildError
from engine.kernels.cpu.native_layers import NativeBackend
from engine.kernels.cpu.torch_attention import CpuAttention
from engine.kernels.decoder_layer import DecoderLayers, LayerWeights, OutputLayer
from engine.kv.kv_cache import KVCache, KVShape
from engine.model.checkpoint import cache_folder

if TYPE_CHECKING:  # Triton is not installed everywhere that the CPU path runs
    from engine.kernels.triton.triton_attention import TritonAttention

LOGGER = logging.getLogger("batchloom.engine")


class AttentionBackend(Protocol):
    """Attention over paged KV for one model on one device: prepare once a step, then write and attend in each layer."""

    @property
    def name(self) -> str:
        """As in `EngineConfig.attention`."""

    @property
    def graphable(self) -> "TritonAttention | None":
        """Itself, where CUDA graphs can be made of its launches."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """What travels through the model's forward to every layer's attention.

    Attributes:
        works: from the backend's `prepare`, one for each block table of the cache.
        output_rows: int64 ``[R]``, the rows whose last hidden states somebody reads; None: all.
    """

    backend: AttentionBackend
    cache: KVCache
    works: Sequence[Any]
    output_rows: torch.Tensor | None = None


def window_of(sliding_window: int | None, config: Any) -> int:
    """The backends' window; 0 where a sliding window is as long as the model's context, so that it hides nothing."""
    return 0 if sliding_window is None or sliding_window >= config.max_position_embeddings else int(sliding_window)


def make_attention(
    name: Attention, *, num_q_heads: int, kv_shape: KVShape, block_size: int, device: torch.device, has_layers: bool
) -> AttentionBackend:
    """The named backend for a model's shape on a device.

    Args:
        name: as in `EngineConfig.attention`. "auto" is "fused" on a GPU; on the CPU it is "native" where that covers
            the model and compiles, else "torch".
        block_size: tokens in a KV block.
        has_layers: whether the backends' own layers compute what the model's do; else they bring attention alone.
    Raises:
        ConfigError: the backend does not run on the device, or does not cover the model.
    """
    shape: dict[str, Any] = {
        "num_q_heads": num_q_heads,
        "num_kv_heads": kv_shape.num_kv_heads,
        "head_dim": kv_shape.head_dim,
        "dtype": kv_shape.dtype,
    }
    if name == "auto" and (device.type != "cpu" or dtype_name(kv_shape.dtype) == "fp8"):
        name = "fused"
    if kv_shape.dtype == torch.int8:
        return _make_int8_attention(shape, block_size=block_size, has_layers=has_layers)
    if name not in ("auto", "native", "torch"):
        from engine.kernels.triton.choose import make_triton_attention  # CPU runs need none of it

        return make_triton_attention(name, **shape, block_size=block_size, device=device, has_layers=has_layers)
    if device.type != "cpu":
        raise ConfigError(f"attention {name!r} runs on the CPU, not on {device}")
    if name != "torch":
        try:
            return NativeBackend(**shape, block_size=block_size, folder=cache_folder(), has_layers=has_layers)
        except (ValueError, NativeBuildError) as error:
            if name == "native":
                raise ConfigError(f"attention 'native': {error}") from error
            LOGGER.info("torch computes the layers, and the night takes about twice as long: %s", error)
    return CpuAttention(**shape)


def _make_int8_attention(shape: dict[str, Any], *, block_size: int, has_layers: bool) -> AttentionBackend:
    from engine.kernels.cpu.int8 import Int8Backend  # other formats need none of it

    del shape["dtype"]
    try:
        if not has_layers:
            raise ValueError("the model's layers are not those of Llama, Mistral or Qwen")
        return Int8Backend(**shape, block_size=block_size, folder=cache_folder())
    except (ValueError, NativeBuildError) as error:
        raise ConfigError(f"dtype 'int8': {error}") from error
