"""Torch twins of the Triton launches: the fused launch tile by tile, the merge, the KV write, and what a layer computes
between its products; and of the C++ experts."""

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import linear, silu

from engine.kernels.branched_layer import BranchedWeights, Experts
from engine.kernels.reference import LOG2_E, attend_ref, block_tokens
from engine.kernels.triton.tile_jobs import SLOT_BITS
from engine.kernels.triton.work_list import RowField, TileField, WorkList


def fused_attention_ref(
    query: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    work_list: WorkList,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> torch.Tensor:
    """The fused launch, tile by tile, from its work list alone."""
    out = torch.full_like(query, torch.nan)
    num_q_heads = query.shape[1]
    partial_out = query.new_full((work_list.num_partials, *query.shape[1:]), torch.nan)
    partial_lse = query.new_full((work_list.num_partials, num_q_heads), torch.nan)
    num_arrived = np.zeros(len(work_list.rows), dtype=np.int64)
    for tile in work_list.tiles[work_list.tiles[:, TileField.NUM_TOKENS] > 0]:
        first_id = tile[TileField.FIRST_ROW_ID]
        rows = work_list.row_ids[first_id : first_id + tile[TileField.NUM_TOKENS]]
        keys, values = (_tile_tokens(cache, work_list, tile) for cache in (k_cache, v_cache))
        # A row of a packed tile sees its own sequence alone.
        position, first_seen = work_list.rows[rows][:, tile[TileField.POSITION_AT] + np.arange(2)].T
        found, lse = torch.empty_like(query[rows]), query.new_empty(len(rows), num_q_heads)
        for first in np.unique(first_seen):
            (chosen,) = np.nonzero(first_seen == first)
            begin = max(int(first), int(tile[TileField.KV_BEGIN]))
            skipped = begin - int(tile[TileField.KV_BEGIN])
            found[chosen], lse[chosen] = attend_ref(
                query[rows[chosen]], keys[skipped:], values[skipped:],
                torch.from_numpy(position[chosen]).to(query.device),
                first_position=begin, scale=scale, softcap=softcap, window=window,
            )  # fmt: skip
        if tile[TileField.PART] < 0:
            out[rows] = found
        else:
            parts = work_list.rows[rows, RowField.FIRST_PART] + tile[TileField.PART]
            partial_out[parts], partial_lse[parts] = found, lse
        num_arrived[rows] += 1
    assert (num_arrived == work_list.rows[:, RowField.NUM_PARTS]).all(), "a row lacks a part, or has one too many"
    for row in np.flatnonzero(work_list.rows[:, RowField.NUM_PARTS] > 1):
        first, num_parts = work_list.rows[row, [RowField.FIRST_PART, RowField.NUM_PARTS]]
        parts = slice(first, first + num_parts)
        out[row] = merge_ref(partial_out[parts], partial_lse[parts])
    return out


def merge_ref(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Partial results over disjoint KV as one: outs ``[P, ..., head_dim]``; lses base 2 ``[P, ...]``, -inf: nothing."""
    weights = torch.softmax(lses / LOG2_E, dim=0)
    return (weights.nan_to_num()[..., None] * outs).sum(dim=0)


def write_kv_ref(
    key: torch.Tensor, value: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Writes rows ``[T, num_kv_heads, head_dim]`` to their slots; a slot of -1 is nowhere."""
    block_size = k_cache.shape[1]
    kept = slots >= 0
    for rows, cache in ((key, k_cache), (value, v_cache)):
        cache[slots[kept] // block_size, slots[kept] % block_size] = rows[kept]


def add_rms_norm_ref(
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    *,
    addend: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen rows of residual plus addend, and their RMSNorm."""
    total = residual if rows is None else residual[rows]
    if addend is not None:
        total = total + addend
    return total, _rms_norm(total, weight, epsilon)


def rotate_and_write_kv_ref(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    num_q_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    epsilon: float = 0.0,
) -> torch.Tensor:
    """Queries, rotated; writes keys and values. `transformers` rotates the same way (`rotate_half`)."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.view(len(qkv), -1, head_dim)
    query, key, value = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        query, key = _rms_norm(query, q_norm, epsilon), _rms_norm(key, k_norm, epsilon)

    def rotated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]

    write_kv_ref(rotated(key), value, k_cache, v_cache, slots[: len(qkv)])
    return rotated(query)


def swiglu_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of ``[T, 2 n]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def experts_ref(normed: torch.Tensor, layer: BranchedWeights) -> torch.Tensor:
    """What the experts of a layer add to rows whose norm is given: each on all rows that have chosen it."""
    experts = layer.experts
    assert experts is not None, "the layer has experts"
    num_experts = experts.num_experts + experts.num_shared
    gates, ups, downs = (weight.view(num_experts, -1, weight.shape[1]) for weight in (layer.gate, layer.up, layer.down))
    biases = [
        [None] * num_experts if bias is None else bias.view(num_experts, -1)
        for bias in (layer.gate_bias, layer.up_bias, layer.down_bias)
    ]
    total = torch.zeros(normed.shape)
    for expert, weights in enumerate(_weigh_experts(normed, experts).T):
        (rows,) = weights.nonzero(as_tuple=True)
        gate_bias, up_bias, down_bias = (bias[expert] for bias in biases)
        gate, up = linear(normed[rows], gates[expert], gate_bias), linear(normed[rows], ups[expert], up_bias)
        if layer.gate_function == "clamped":
            gate = gate.clamp(max=layer.gate_limit)
            gated = gate * (layer.gate_alpha * gate).sigmoid() * (up.clamp(-layer.gate_limit, layer.gate_limit) + 1)
        else:
            gated = silu(gate) * up
        total[rows] += weights[rows, None] * linear(gated, downs[expert], down_bias)
    return total.to(normed.dtype)


def _weigh_experts(normed: torch.Tensor, experts: Experts) -> torch.Tensor:
    """Each row's weight of each expert, the shared ones last: ``[T, experts]``; 0: not chosen."""
    logits = linear(normed.float(), experts.router.float())
    shared = logits[:, -1:].sigmoid() if experts.has_shared_gate else torch.ones(len(normed), 1)
    logits = logits[:, : experts.num_experts]
    if experts.router_bias is not None:
        logits = logits + experts.router_bias.float()
    chosen = logits.topk(experts.num_chosen, dim=1).indices
    kept = logits.masked_fill(torch.ones_like(logits).scatter(1, chosen, 0).bool(), -torch.inf)
    weights = kept.softmax(1) if experts.is_renormalised else logits.softmax(1) * (kept > -torch.inf)
    return torch.cat([weights, shared.expand(-1, experts.num_shared)], dim=1)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + epsilon) * weight


def _tile_tokens(cache: torch.Tensor, work_list: WorkList, tile: npt.NDArray[np.int32]) -> torch.Tensor:
    """The KV of a tile's positions, prefix and own part in a row."""
    begin, end, prefix_len = (int(tile[f]) for f in (TileField.KV_BEGIN, TileField.KV_END, TileField.PREFIX_LEN))
    ranges = (
        (int(tile[TileField.PREFIX_ENTRY]), begin, max(begin, min(end, prefix_len))),
        (int(tile[TileField.OWN_ENTRY]), max(begin - prefix_len, 0), max(end - prefix_len, 0)),
    )
    return torch.cat(
        [block_tokens(cache, work_list.block_table[entry:] >> SLOT_BITS, first, last) for entry, first, last in ranges]
    )
