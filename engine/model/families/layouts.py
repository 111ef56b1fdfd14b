"""The module names of each family, and the differences that its modules do not show."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The module names of a family, and its other differences.

    Attributes:
        attention_norm, mlp_norm: norms before attention and feed-forward; empty: none.
        post_attention_norm, post_mlp_norm: norms after them, before the residual addition; empty: none.
        output, mlp: attention's output product, and the feed-forward.
        norm_offset: added to the weights of norms.
        is_parallel: whether attention and feed-forward both read the rows of attention_norm.
        is_interleaved: whether dimensions 2 d and 2 d + 1 are rotated as a pair, not d and d + head_dim / 2.
        angles: which of the rotary embedding's angles are distinct; None: the first half, and the second repeats them.
        is_rotated: whether an attention module rotates its heads.
    """

    attention_norm: str = "input_layernorm"
    post_attention_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    post_mlp_norm: str = ""
    output: str = "o_proj"
    mlp: str = "mlp"
    norm_offset: float = 0.0
    is_parallel: bool = False
    is_interleaved: bool = False
    angles: slice | None = None
    is_rotated: Callable[[Any], bool] = lambda attention: True

    @property
    def norms(self) -> tuple[str, ...]:
        """The names of all norms."""
        names = (self.attention_norm, self.post_attention_norm, self.mlp_norm, self.post_mlp_norm)
        return tuple(name for name in names if name)


_GEMMA = Layout(
    post_attention_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
    norm_offset=1.0,
)
_OLMO = Layout(
    attention_norm="",
    post_attention_norm="post_attention_layernorm",
    mlp_norm="",
    post_mlp_norm="post_feedforward_layernorm",
)
_EXAONE = replace(_OLMO, is_rotated=lambda attention: attention.sliding_window is None or attention.is_sliding)
_GLM = Layout(post_attention_norm="post_self_attn_layernorm", post_mlp_norm="post_mlp_layernorm", is_interleaved=True)
_COHERE = Layout(mlp_norm="", is_parallel=True, is_interleaved=True, angles=slice(None, None, 2))
_COHERE2 = replace(_COHERE, is_rotated=lambda attention: attention.sliding_window is not None)

LAYOUTS = {
    "cohere": _COHERE,
    "cohere2": _COHERE2,
    "ernie4_5": Layout(is_interleaved=True),
    "exaone4": _EXAONE,
    "gemma": Layout(norm_offset=1.0),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "glm4": _GLM,
    "gpt_oss": Layout(angles=slice(None)),
    "granite": Layout(),
    "granitemoe": Layout(mlp="block_sparse_moe"),
    "llama": Layout(),
    "ministral": Layout(),
    "mixtral": Layout(),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "olmoe": Layout(),
    "phi": Layout(mlp_norm="", output="dense", is_parallel=True),
    "phi3": Layout(),
    "qwen2_moe": Layout(),
    "qwen3_moe": Layout(),
    "seed_oss": Layout(),
    "smollm3": Layout(is_rotated=lambda attention: bool(attention.use_rope)),
    "starcoder2": Layout(),
}
"""By `model_type`."""
