"""Decoder layers of families that differ from Llama's by norms, branches, gates, rotations and experts, as data."""

from dataclasses import dataclass

import torch

from engine.kernels.decoder_layer import DECODER_LAYER, LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Which experts compute the feed-forward of a row. Their weights follow one another in `BranchedWeights`.

    The first `num_experts` are chosen among, by the largest of their logits; the others are shared by all rows.

    Attributes:
        router: ``[num_experts, hidden]``; with a shared gate one row more, whose sigmoid weighs the shared ones.
        router_bias: ``[num_experts]``.
        num_chosen: of a row.
        is_renormalised: whether a row's weights are the softmax of the chosen logits, not of all.
    """

    router: torch.Tensor
    router_bias: torch.Tensor | None = None
    num_experts: int
    num_chosen: int
    num_shared: int = 0
    is_renormalised: bool = True

    @property
    def has_shared_gate(self) -> bool:
        return len(self.router) > self.num_experts


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchedWeights(LayerWeights):
    """The weights of one layer, and what it does with them besides what `LayerWeights` say.

    An empty `attention_norm` or `mlp_norm` takes rows as they are. Norms are of weight + `norm_offset`. Without `up`
    (empty) the activated `gate` is the feed-forward's first product. With experts, `gate` and `up` are ``[experts *
    intermediate, hidden]``, `down` is ``[experts * hidden, intermediate]``, and so are their biases.

    Attributes:
        attention_norm_bias, mlp_norm_bias: ``[hidden]``, of LayerNorm.
        post_attention_norm, post_mlp_norm: ``[hidden]``, of a branch before it is added; None: it is not normed.
        apart_q_norm, apart_k_norm: ``[head_dim]``, or ``[heads * head_dim]`` for all heads together; in place of q_norm
            and k_norm, which know neither that nor an offset.
        gate_bias, up_bias, down_bias: of the feed-forward.
        is_centered: whether attention_norm and mlp_norm are LayerNorm, not RMSNorm.
        is_parallel: whether the feed-forward reads what attention reads, and mlp_norm does not exist.
        norm_offset: 1 for Gemma.
        softcap: of the attention scores; 0: none.
        sinks: float32 ``[num_q_heads]``, a score of attention without a value.
        multiplier: of a branch before it is added.
        gate_function: "silu", "gelu_tanh", "gelu", or "clamped" for gpt-oss's, with its alpha and limit.
        rotation: which of the step's rotations turns the heads.
    """

    attention_norm_bias: torch.Tensor | None = None
    mlp_norm_bias: torch.Tensor | None = None
    post_attention_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None
    apart_q_norm: torch.Tensor | None = None
    apart_k_norm: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    is_centered: bool = False
    is_parallel: bool = False
    norm_offset: float = 0.0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    multiplier: float = 1.0
    gate_function: str = "silu"
    gate_alpha: float = 0.0
    gate_limit: float = 0.0
    rotation: int = 0
    experts: Experts | None = None

    @property
    def has_wide_norms(self) -> bool:
        """Whether all heads of a row are normed together."""
        return self.apart_q_norm is not None and len(self.apart_q_norm) == self.output[0].shape[1]

    @property
    def is_gated(self) -> bool:
        return self.up.numel() > 0

    @property
    def operations(self) -> tuple[str, ...]:
        """In order; those of `DECODER_LAYER` where they do.

        attention_input, mlp_input: in place of a norm, LayerNorm, a norm with an offset, or none.
        norm_heads: of query and key heads, before they are rotated.
        select_normed_rows: as select_rows, of the normed rows as well, which the feed-forward reads.
        output_branch, down_branch: a product that is added later, by add_attention and add_mlp, normed or multiplied.
        activate: in place of gate_up, another activation than silu, a bias, or no gate.
        route, experts: in place of gate_up and down, rows sorted by expert, and the weighted sum of what the experts
            of each row make of it, which add_mlp adds.
        """
        other: dict[str, tuple[str, ...]] = {}
        if self.norm_offset or self.is_centered or not self.attention_norm.numel():
            other |= {"attention_norm": ("attention_input",)}
        if self.norm_offset or self.is_centered or not self.mlp_norm.numel():
            other |= {"mlp_norm": ("mlp_input",)}
        if self.is_parallel:
            other |= {"select_rows": ("select_normed_rows",), "mlp_norm": ()}
        if self.apart_q_norm is not None:
            other |= {"qkv": ("qkv", "norm_heads")}
        if self.gate_function != "silu" or self.gate_bias is not None or not self.is_gated:
            other |= {"gate_up": ("activate",)}
        if self.post_attention_norm is not None or self.multiplier != 1:
            other |= {"output": ("output_branch", "add_attention")}
        if self.post_mlp_norm is not None or self.multiplier != 1:
            other |= {"down": ("down_branch", "add_mlp")}
        if self.experts is not None:
            other |= {"gate_up": ("route",), "down": ("experts", "add_mlp")}
        return tuple(name for usual in DECODER_LAYER for name in other.get(usual, (usual,)))
