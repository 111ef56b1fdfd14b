"""Weights and operations of decoder layers that differ from Llama's: norms, gates, rotations, residuals, experts."""

from dataclasses import dataclass

import torch

from engine.kernels.decoder_layer import DECODER_LAYER, LayerWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How rows are routed to experts, whose weights are concatenated in `BranchedWeights`.

    A row is computed by the `num_chosen` experts with the largest logits among the first `num_experts`, and by all of
    the `num_shared` experts that follow them.

    Attributes:
        router: ``[num_experts, hidden]``; one more row, if any, is a gate whose sigmoid weighs the shared experts.
        router_bias: ``[num_experts]``.
        is_renormalised: whether weights are the softmax over the chosen logits, not over all.
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
    """The weights of one layer that is not plain, and what distinguishes it from a plain one.

    An empty `attention_norm` or `mlp_norm` is the identity. With an empty `up` the feed-forward has no gate, and `gate`
    is its first product. With experts, `gate` and `up` are ``[experts * intermediate, hidden]`` and `down` is
    ``[experts * hidden, intermediate]``; biases likewise.

    Attributes:
        attention_norm_bias, mlp_norm_bias: ``[hidden]``, of LayerNorm.
        post_attention_norm, post_mlp_norm: ``[hidden]``, applied to a branch before it is added to the residual stream.
        apart_q_norm, apart_k_norm: in place of q_norm and k_norm for norms with an offset, ``[head_dim]``, and norms
            over all heads, ``[heads * head_dim]``.
        gate_bias, up_bias, down_bias: of the feed-forward.
        is_centered: whether attention_norm and mlp_norm are LayerNorm, not RMSNorm.
        is_parallel: whether the feed-forward reads the same normed rows as attention; there is no mlp_norm.
        norm_offset: added to the weights of norms; 1 for Gemma.
        multiplier: of a branch before it is added to the residual stream.
        gate_function: "silu", "gelu_tanh", "gelu", or "clamped": gpt-oss's, with `gate_alpha` and `gate_limit`.
        rotation: index of the step's rotation that is applied to the heads.
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
    multiplier: float = 1.0
    gate_function: str = "silu"
    gate_alpha: float = 0.0
    gate_limit: float = 0.0
    rotation: int = 0
    experts: Experts | None = None

    @property
    def has_wide_norms(self) -> bool:
        """Whether the query and key norms extend over all heads of a row."""
        return self.apart_q_norm is not None and len(self.apart_q_norm) == self.output[0].shape[1]

    @property
    def is_gated(self) -> bool:
        return self.up.numel() > 0

    @property
    def operations(self) -> tuple[str, ...]:
        """In order: those of `DECODER_LAYER`, some of them replaced.

        attention_input, mlp_input: replace a norm by LayerNorm, a norm with an offset, or the identity.
        norm_heads: norms query and key heads before they are rotated.
        select_normed_rows: select_rows that also selects the normed rows, which a parallel feed-forward reads.
        output_branch, down_branch: a product that add_attention or add_mlp norms, multiplies and adds later.
        activate: replaces gate_up for another activation than silu, a bias, or no gate.
        route, experts: replace gate_up and down: sort rows by expert, then compute the weighted sum of their experts'
            results, which add_mlp adds.
        """
        replaced: dict[str, tuple[str, ...]] = {}
        if self.norm_offset or self.is_centered or not self.attention_norm.numel():
            replaced["attention_norm"] = ("attention_input",)
        if self.norm_offset or self.is_centered or not self.mlp_norm.numel():
            replaced["mlp_norm"] = ("mlp_input",)
        if self.is_parallel:
            replaced |= {"select_rows": ("select_normed_rows",), "mlp_norm": ()}
        if self.apart_q_norm is not None:
            replaced["qkv"] = ("qkv", "norm_heads")
        if self.gate_function != "silu" or self.gate_bias is not None or not self.is_gated:
            replaced["gate_up"] = ("activate",)
        if self.post_attention_norm is not None or self.multiplier != 1:
            replaced["output"] = ("output_branch", "add_attention")
        if self.post_mlp_norm is not None or self.multiplier != 1:
            replaced["down"] = ("down_branch", "add_mlp")
        if self.experts is not None:
            replaced |= {"gate_up": ("route",), "down": ("experts", "add_mlp")}
        return tuple(name for usual in DECODER_LAYER for name in replaced.get(usual, (usual,)))
