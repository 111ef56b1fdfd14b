"""Attention one sequence at a time, with windows, soft caps and sinks, which torch's fused attention lacks.

It reads only the KV within a sequence's window, and computes in fp32. Used where the C++ kernels, which read a shared
prefix once, are not available.
"""

import torch

from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.reference import own_tokens, prefix_tokens, sequence_rows
from engine.kernels.scoring import Scoring


def attend_by_sequence(
    query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, scoring: Scoring
) -> torch.Tensor:
    """See `AttentionBackend.attend`; takes the step's `batch` in place of its prepared work."""
    softcap, window, sinks = scoring.softcap, scoring.window, scoring.sinks
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    num_kv_heads, head_dim = k_cache.shape[2:]
    for group in range(batch.num_groups):
        prefix_len = int(batch.prefix_lens[group])
        for sequence in range(*batch.group_starts[group : group + 2]):
            rows, positions = sequence_rows(batch, group, sequence, query.device)
            begin = max(0, int(positions[0]) - window + 1) if window else 0
            first, first_own = min(begin, prefix_len), max(0, begin - prefix_len)
            # [num_kv_heads, 1, L, head_dim] against [num_kv_heads, group_size, n, head_dim].
            key, value = (
                torch.cat([prefix_tokens(cache, batch, group, first), own_tokens(cache, batch, sequence, first_own)])
                .float()
                .transpose(0, 1)
                .unsqueeze(1)
                for cache in (k_cache, v_cache)
            )
            own = query[rows].float().view(len(positions), num_kv_heads, -1, head_dim)
            scores = own.permute(1, 2, 0, 3) @ key.transpose(-1, -2) * scoring.scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            seen = torch.arange(begin, int(positions[-1]) + 1)
            is_hidden = seen > positions[:, None]
            if window:
                is_hidden |= seen <= positions[:, None] - window
            scores = scores.masked_fill(is_hidden, -torch.inf)
            if sinks is not None:  # a column of scores whose value is 0
                sink = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
                weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
            else:
                weights = scores.softmax(dim=-1)
            out[rows] = (weights @ value).permute(2, 0, 1, 3).reshape(len(positions), -1, head_dim)
    return out
