"""Attention in plain torch, in the dtype of its inputs (float64 too): the reference for all kernels. Imports no Triton.

Log-sum-exps are base 2 and of the scaled scores, as in the kernels.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.scoring import Scoring

LOG2_E = 1.4426950408889634


def paged_attention_ref(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, scoring: Scoring
) -> torch.Tensor:
    """See `AttentionBackend.attend`; takes the step's `batch`. Each row is one softmax over prefix and own KV."""
    out = torch.empty_like(query)
    for group in range(batch.num_groups):
        for sequence in range(*batch.group_starts[group : group + 2]):
            rows, positions = sequence_rows(batch, group, sequence, query.device)
            keys, values = (
                torch.cat([prefix_tokens(cache, batch, group), own_tokens(cache, batch, sequence)])
                for cache in (k_cache, v_cache)
            )
            found, lse = attend_ref(
                query[rows], keys, values, positions,
                first_position=0, scale=scoring.scale, softcap=scoring.softcap, window=scoring.window,
            )  # fmt: skip
            out[rows] = found if scoring.sinks is None else found * sink_share(lse, scoring.sinks)
    return out


def attend_ref(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    *,
    first_position: int,
    scale: float,
    softcap: float,
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows against consecutive KV tokens. Returns out like query, 0 for a row that sees no token, and the
    lse, ``[n, num_q_heads]``, -inf for such a row.

    Args:
        query: ``[n, num_q_heads, head_dim]``.
        keys, values: ``[L, num_kv_heads, head_dim]``; the first token is at first_position.
        positions: ``[n]``, of the rows.
    """
    group_size = query.shape[1] // keys.shape[1]
    keys, values = (tokens.repeat_interleave(group_size, dim=1) for tokens in (keys, values))
    scores = torch.einsum("nhd,lhd->nhl", query, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = first_position + torch.arange(len(keys), device=keys.device)
    is_visible = position <= positions[:, None]
    if window:
        is_visible &= position > positions[:, None] - window
    scores = scores.masked_fill(~is_visible[:, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse == -torch.inf, 0, lse)[..., None])
    return torch.einsum("nhl,lhd->nhd", weights, values), lse * LOG2_E


def sink_share(lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The factor ``[n, num_q_heads, 1]`` that turns attention without sinks into attention with sinks. `lse` is base 2,
    over all tokens that the rows see, ``[n, num_q_heads]``; `sinks` are natural scores, ``[num_q_heads]``."""
    return torch.sigmoid(lse / LOG2_E - sinks).to(lse.dtype)[..., None]


def sequence_rows(batch: AttentionBatch, group: int, sequence: int, device: torch.device) -> tuple[slice, torch.Tensor]:
    """The rows of the batch's `sequence`, and their positions; `group` is the sequence's. See `AttentionBatch`."""
    first, last = batch.cu_seqlens_q[sequence : sequence + 2].tolist()
    end = int(batch.prefix_lens[group] + batch.suffix_lens[sequence])
    return slice(first, last), torch.arange(end - (last - first), end, device=device)


def prefix_tokens(cache: torch.Tensor, batch: AttentionBatch, group: int, begin: int = 0) -> torch.Tensor:
    """The keys or values of a group's prefix: ``[tokens, num_kv_heads, head_dim]``.

    Args:
        cache: one layer's keys or values, ``[num_blocks, block_size, num_kv_heads, head_dim]``.
        begin: first token of the prefix to return.
    """
    table = batch.prefix_block_ids[slice(*batch.prefix_block_starts[group : group + 2])]
    return block_tokens(cache, table, begin, int(batch.prefix_lens[group]))


def own_tokens(cache: torch.Tensor, batch: AttentionBatch, sequence: int, begin: int = 0) -> torch.Tensor:
    """Of a `sequence` after its prefix. See `prefix_tokens`."""
    table = batch.suffix_block_table[slice(*batch.suffix_block_starts[sequence : sequence + 2])]
    return block_tokens(cache, table, begin, int(batch.suffix_lens[sequence]))


def block_tokens(cache: torch.Tensor, table: npt.NDArray[np.int32], begin: int, end: int) -> torch.Tensor:
    """The keys or values of tokens [`begin`, `end`) of a block `table`. See `prefix_tokens`."""
    first, block_size = begin // cache.shape[1], cache.shape[1]
    blocks = torch.from_numpy(table[first : cdiv(end, block_size)].astype(np.int64)).to(cache.device)
    return cache[blocks].flatten(0, 1)[begin - first * block_size : end - first * block_size]
