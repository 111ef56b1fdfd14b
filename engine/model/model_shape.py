"""The computation and memory of a decoder-only transformer, from its config.json; no weights are needed."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.kv.kv_layout import KVLayout, find_layout, kept_windows
from engine.model.layer_counts import count_layer_weights, text_config_of
from engine.model.layer_windows import find_kept_windows, find_windows
from engine.model.loading.checkpoint import PLAIN_MODEL_TYPES
from engine.model.loading.config_sizes import VALUE_BYTES, kv_head_bytes, read_size, read_sizes

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder and of its number format.

    Attributes:
        intermediate_size: of the feed-forward layer, or of one expert.
        num_experts, num_active_experts: of a layer, and how many of them compute a token; 1 without experts.
        quantized_bytes: average size of a weight in a quantized file; 0: weights are not quantized.
        value_bytes: size of a number in the KV cache, and of a weight that is not quantized.
        has_tied_embeddings: whether the output layer is the embedding table.
        head_value_bytes: size of a weight of the output layer; 0: as other weights.
        counted_weights: number of weights of all layers, outside experts and in all experts; None: layers have Llama's
            matrices, and the sizes above give their number.
        windows: of each layer, the positions that a row sees, 0 for all; empty if no layer has a window.
        kept_windows: likewise, for layers whose KV outside the window is freed.
    """

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    has_tied_embeddings: bool
    value_bytes: int
    num_experts: int = 1
    num_active_experts: int = 1
    quantized_bytes: float = 0.0
    head_value_bytes: int = 0
    counted_weights: tuple[int, int] | None = None
    windows: tuple[int, ...] = ()
    kept_windows: tuple[int, ...] = ()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, dtype: str) -> "ModelShape":
        """Reads the keys of a config.json, for weights and KV in dtype: fp8, int8, bfloat16, float16 or float32.

        For architectures that are not plain, transformers' config class adds defaults, and the weights of its layers
        are counted on the meta device. Raises `ModelError` if a size is missing or not a positive integer.
        """
        values, text_config = read_sizes(config), None
        if values.get("model_type") not in (None, *PLAIN_MODEL_TYPES):
            text_config = text_config_of(config)
        num_experts = next((read_size(values, name) for name in _EXPERTS if values.get(name)), 1)
        num_q_heads = read_size(values, "num_attention_heads")
        hidden_size = read_size(values, "hidden_size")
        return cls(
            num_layers=read_size(values, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=read_size(
                values,
                "moe_intermediate_size" if values.get("moe_intermediate_size") else "intermediate_size",
                None if text_config is None else 4 * hidden_size,
            ),
            num_q_heads=num_q_heads,
            num_kv_heads=read_size(values, "num_key_value_heads", num_q_heads),
            head_dim=read_size(values, "head_dim", hidden_size // num_q_heads),
            vocab_size=read_size(values, "vocab_size"),
            has_tied_embeddings=bool(values.get("tie_word_embeddings", False)),
            value_bytes=VALUE_BYTES[dtype],
            head_value_bytes=2 if dtype == "fp8" else 0,
            num_experts=num_experts,
            num_active_experts=read_size(values, "num_experts_per_tok") if num_experts > 1 else 1,
            counted_weights=None if text_config is None else count_layer_weights(text_config, num_experts),
            windows=find_windows(values),
            kept_windows=find_kept_windows(values),
        )

    @property
    def num_layer_weights(self) -> int:
        """Weights of all layers' matrices that a token is multiplied with; norms and biases are too small to count."""
        return round(self._weights_of_layers(self.num_active_experts))

    def num_read_weights(self, num_rows: int) -> int:
        """Expected weights of the layers that a step of num_rows tokens reads, if they choose experts independently."""
        share_missed = (1 - self.num_active_experts / self.num_experts) ** num_rows
        return round(self._weights_of_layers(self.num_experts * (1 - share_missed)))

    def _weights_of_layers(self, num_experts: float) -> float:
        if self.counted_weights is not None:
            num_outside, num_of_experts = self.counted_weights
            return num_outside + num_of_experts * num_experts / self.num_experts
        attention = self.hidden_size * self.head_dim * (2 * self.num_q_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + num_experts * 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """Weights of the output layer, used once per output row."""
        return self.hidden_size * self.vocab_size

    @property
    def head_bytes(self) -> float:
        """Memory of the output layer's weights."""
        return self.num_head_weights * (self.head_value_bytes or self.bytes_per_weight)

    @property
    def bytes_per_weight(self) -> float:
        return self.quantized_bytes or self.value_bytes

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights. Embedding tables have at least 16 bits unless the file is quantized."""
        table_value_bytes = self.quantized_bytes or max(2, self.value_bytes)
        table_bytes = 0 if self.has_tied_embeddings else self.num_head_weights * table_value_bytes
        layer_bytes = self._weights_of_layers(self.num_experts) * self.bytes_per_weight
        return round(layer_bytes + self.head_bytes + table_bytes)

    @property
    def kv_bytes_per_layer(self) -> int:
        """KV bytes of a token in one layer."""
        return 2 * self.num_kv_heads * kv_head_bytes(self.head_dim, self.value_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV bytes of a token in all layers."""
        return self.num_layers * self.kv_bytes_per_layer

    def kv_layout(self, config: EngineConfig) -> KVLayout:
        """The engine's block tables."""
        return find_layout(kept_windows(self.kept_windows, config) or (0,) * self.num_layers)

    def kv_block_bytes(self, config: EngineConfig) -> int:
        """Bytes of a block of the engine's KV memory."""
        return config.block_size * self.kv_layout(config).num_slots * self.kv_bytes_per_layer

    @property
    def layers_by_window(self) -> dict[int, int]:
        """How many layers have each window: positions that a row sees, 0 for all, to the number of layers."""
        return dict(Counter(self.windows)) if self.windows else {0: self.num_layers}

    @property
    def flops_per_attention_pair(self) -> int:
        """Flops of one query token against one KV token, in all layers: a product for the score, one for the value."""
        return 4 * self.num_layers * self.num_q_heads * self.head_dim
