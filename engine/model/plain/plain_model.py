"""Llama, Mistral and Qwen models as torch modules, with the names that checkpoints and transformers use.

If a backend has its own layers, it reads the weights from these modules, which are then dropped.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from engine.kernels.scoring import Scoring
from engine.model.attention_step import AttentionStep
from engine.model.layer_windows import window_of

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, ``[1, T, head_dim]`` each."""


class PlainConfig(SimpleNamespace):
    """A model's configuration under transformers' names; read by `plain_checkpoint`."""

    def get_text_config(self, decoder: bool = True) -> "PlainConfig":
        """Itself. transformers' configs of several modalities return a part."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class PlainModel(nn.Module):
    """A decoder and its output layer, with the methods of transformers' models that the engine calls. ``eos_token_id``
    of `generation_config` is from generation_config.json; None: config.json's ends answers."""

    base_model_prefix = "model"

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        self.generation_config = SimpleNamespace(eos_token_id=config.eos_token_id)
        self.model = PlainDecoder(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def dtype(self) -> torch.dtype:
        return self.model.norm.weight.dtype

    def get_decoder(self) -> "PlainDecoder":
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


class PlainDecoder(nn.Module):
    """Token ids to last hidden states. `layers` may be replaced by one module of the backend."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = Rotation(config)

    def forward(
        self, *, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_step: AttentionStep, use_cache: bool
    ) -> Any:
        """Returns ``last_hidden_state``, as transformers' decoders do: ``[1, T, hidden]``, or ``[1, R, hidden]`` if the
        backend's layers return only the step's output rows.

        Args:
            input_ids, position_ids: int64 ``[1, T]``.
            attention_step: the step's work and KV cache, which is written.
            use_cache: ignored.
        """
        hidden = self.embed_tokens(input_ids)
        angles = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=angles, attention_step=attention_step)
        return SimpleNamespace(last_hidden_state=self.norm(hidden))


class Linear(nn.Linear):
    """Does not initialise its weights, which are read from files: that would import for a second, even on meta."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """As `Linear`."""

    def reset_parameters(self) -> None:
        pass


class Layer(nn.Module):
    def __init__(self, config: PlainConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, index)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size)

    def forward(
        self, hidden: torch.Tensor, *, position_embeddings: Angles, attention_step: AttentionStep
    ) -> torch.Tensor:
        """See `PlainDecoder.forward`."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), position_embeddings, attention_step)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Projections around attention, which the step's backend computes."""

    is_causal = True

    def __init__(self, config: PlainConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = index
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        has_bias = config.attention_bias or config.model_type == "qwen2"
        num_rows = config.num_attention_heads * config.head_dim
        num_kv_rows = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, num_rows, bias=has_bias)
        self.k_proj = Linear(config.hidden_size, num_kv_rows, bias=has_bias)
        self.v_proj = Linear(config.hidden_size, num_kv_rows, bias=has_bias)
        self.o_proj = Linear(num_rows, config.hidden_size, bias=config.attention_bias)
        if config.model_type == "qwen3":
            self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, hidden: torch.Tensor, angles: Angles, step: AttentionStep) -> torch.Tensor:
        """See `PlainDecoder.forward`."""
        q, k, v = (
            product(hidden[0]).unflatten(-1, (-1, self.head_dim)) for product in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.config.model_type == "qwen3":
            q, k = self.q_norm(q), self.k_norm(k)
        attended = self.attend(_rotate(q, angles), _rotate(k, angles), v, step)
        return self.o_proj(attended.flatten(1)).unsqueeze(0)  # type: ignore[no-any-return]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: AttentionStep) -> torch.Tensor:
        """See `AttentionStep.attend`."""
        scoring = Scoring(scale=self.scaling, window=window_of(self.config.sliding_window, self.config))
        return step.attend(self.layer_idx, q, k, v, scoring)


class FeedForward(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))  # type: ignore[no-any-return]


class RMSNorm(nn.Module):
    """Over the last dimension, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        normed: torch.Tensor = self.weight * wide.to(x.dtype)
        return normed


class Rotation(nn.Module):
    """Rotary embeddings (RoFormer, Su et al. 2021, section 3.4.2), with Llama 3's scaling if configured."""

    def __init__(self, config: PlainConfig) -> None:
        super().__init__()
        rope = config.rope_parameters
        # On the CPU, also if the model is made on the meta device.
        numbers = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu")
        frequencies = 1.0 / (rope["rope_theta"] ** (numbers / config.head_dim))
        if rope["rope_type"] == "llama3":
            from engine.model.plain.llama3_rotation import scale  # imported only when needed

            frequencies = scale(frequencies, rope)
        self.inv_freq = nn.Buffer(frequencies, persistent=False)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Angles:
        """int64 ``[1, T]`` -> cosines and sines in the dtype of `x`."""
        halves = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat([halves, halves], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def _rotate(heads: torch.Tensor, angles: Angles) -> torch.Tensor:
    """Rotates heads ``[T, heads, head_dim]``: dimensions d and d + head_dim / 2 are a pair."""
    cos, sin = (each[0].unsqueeze(1) for each in angles)
    left, right = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-right, left], dim=-1) * sin
