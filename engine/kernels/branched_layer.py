"""Decoder layers of families that differ from Llama's by norms, branches, gates and rotations, as data."""

from dataclasses import dataclass

import torch

from engine.kernels.decoder_layer import DECODER_LAYER, LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchedWeights(LayerWeights):
    """The weights of one layer, and what it does with them besides what `LayerWeights` say.

    An empty `attention_norm` or `mlp_norm` takes rows as they are. Norms are of weight + `norm_offset`.

    Attributes:
        post_attention_norm, post_mlp_norm: ``[hidden]``, of a branch before it is added; None: it is not normed.
        apart_q_norm, apart_k_norm: ``[head_dim]``, or ``[heads * head_dim]`` for all heads together; in place of q_norm
            and k_norm, which know neither that nor an offset.
        norm_offset: 1 for Gemma.
        softcap: of the attention scores; 0: none.
        multiplier: of a branch before it is added.
        gate_function: "silu", or "gelu" with tanh.
        rotation: which of the step's rotations turns the heads.
    """

    post_attention_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None
    apart_q_norm: torch.Tensor | None = None
    apart_k_norm: torch.Tensor | None = None
    norm_offset: float = 0.0
    softcap: float = 0.0
    multiplier: float = 1.0
    gate_function: str = "silu"
    rotation: int = 0

    @property
    def has_wide_norms(self) -> bool:
        """Whether all heads of a row are normed together."""
        return self.apart_q_norm is not None and len(self.apart_q_norm) == self.output[0].shape[1]

    @property
    def operations(self) -> tuple[str, ...]:
        """In order; those of `DECODER_LAYER` where they do.

        attention_input, mlp_input: in place of a norm, one with an offset, or none.
        norm_heads: of query and key heads, before they are rotated.
        output_branch, down_branch: a product that is added later, by add_attention and add_mlp, normed or multiplied.
        gate_up_apart: in place of gate_up, followed by activate, which multiplies with another gate than silu.
        """
        other: dict[str, tuple[str, ...]] = {}
        if self.norm_offset or not self.attention_norm.numel():
            other |= {"attention_norm": ("attention_input",)}
        if self.norm_offset or not self.mlp_norm.numel():
            other |= {"mlp_norm": ("mlp_input",)}
        if self.apart_q_norm is not None:
            other |= {"qkv": ("qkv", "norm_heads")}
        if self.gate_function != "silu":
            other |= {"gate_up": ("gate_up_apart", "activate")}
        if self.post_attention_norm is not None or self.multiplier != 1:
            other |= {"output": ("output_branch", "add_attention")}
        if self.post_mlp_norm is not None or self.multiplier != 1:
            other |= {"down": ("down_branch", "add_mlp")}
        return tuple(name for usual in DECODER_LAYER for name in other.get(usual, (usual,)))
