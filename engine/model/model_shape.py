"""What a decoder-only transformer computes and keeps per token, read from its config.json; no weights are needed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import ModelError

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
VALUE_BYTES = {"int8": 1, "bfloat16": 2, "float16": 2, "float32": 4, "quantized": 2}

_SCALE_BYTES = 2
"""In int8, of the scale of a token's head in the KV cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder with gated feed-forward layers, or experts of such, and of its number format.

    Attributes:
        intermediate_size: of the feed-forward layer, or of one expert.
        num_experts, num_active_experts: of a layer, and those that a token goes through; 1 without experts.
        quantized_bytes: of one weight of a quantized file on average; 0: weights are not quantized.
        value_bytes: of one number in the KV cache, and of one weight that is not quantized.
        has_tied_embeddings: the output layer is the embedding table.
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

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, dtype: str) -> "ModelShape":
        """Reads the keys that transformers writes.

        Args:
            dtype: of weights and KV, as torch names it: int8, bfloat16, float16 or float32.
        Raises:
            ModelError: a size is missing or no positive whole number.
        """
        values = config.get("text_config", config)
        if not isinstance(values, Mapping):
            raise ModelError(f"config.json: text_config must be an object, got {values!r}")
        num_experts = next((int(values[name]) for name in _EXPERTS if values.get(name)), 1)
        num_q_heads = _size(values, "num_attention_heads")
        hidden_size = _size(values, "hidden_size")
        return cls(
            num_layers=_size(values, "num_hidden_layers"),
            hidden_size=hidden_size,
            intermediate_size=_size(
                values, "moe_intermediate_size" if values.get("moe_intermediate_size") else "intermediate_size"
            ),
            num_q_heads=num_q_heads,
            num_kv_heads=_size(values, "num_key_value_heads", num_q_heads),
            head_dim=_size(values, "head_dim", hidden_size // num_q_heads),
            vocab_size=_size(values, "vocab_size"),
            has_tied_embeddings=bool(values.get("tie_word_embeddings", False)),
            value_bytes=VALUE_BYTES[dtype],
            num_experts=num_experts,
            num_active_experts=_size(values, "num_experts_per_tok") if num_experts > 1 else 1,
        )

    @property
    def num_layer_weights(self) -> int:
        """Weights that a token goes through in all layers' matrices; norms and biases are too small to count."""
        return self._weights_of_layers(self.num_active_experts)

    def num_read_weights(self, num_rows: int) -> int:
        """Weights of the layers that a step of num_rows tokens reads: of experts, those that the tokens may reach."""
        return self._weights_of_layers(min(self.num_experts, num_rows * self.num_active_experts))

    def _weights_of_layers(self, num_experts: int) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_q_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + num_experts * 3 * self.hidden_size * self.intermediate_size)

    @property
    def num_head_weights(self) -> int:
        """Weights of the output layer, used once per row whose next token is drawn."""
        return self.hidden_size * self.vocab_size

    @property
    def bytes_per_weight(self) -> float:
        return self.quantized_bytes or self.value_bytes

    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take; where they are not quantized, a table of embeddings is never below 16 bits."""
        table_value_bytes = self.quantized_bytes or max(2, self.value_bytes)
        table_bytes = 0 if self.has_tied_embeddings else self.num_head_weights * table_value_bytes
        num_weights = self._weights_of_layers(self.num_experts) + self.num_head_weights
        return round(num_weights * self.bytes_per_weight + table_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        head_bytes = self.head_dim * self.value_bytes + (_SCALE_BYTES if self.value_bytes == 1 else 0)
        return 2 * self.num_layers * self.num_kv_heads * head_bytes

    @property
    def flops_per_attention_pair(self) -> int:
        """Of one query token meeting one key token, in all layers: a product for the score and one for the value."""
        return 4 * self.num_layers * self.num_q_heads * self.head_dim


def _size(values: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = values.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} must be a positive whole number, got {value!r}")
    return value
