"""Attention one sequence at a time, with windows, soft caps and sinks, which torch's fused attention lacks.

It reads only the KV within a sequence's window, and computes in fp32. Used where the C++ kernels, which read a shared
prefix once, are not available.
"""

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import cdiv
from engine.kernels.attention_batch import AttentionBatch
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
        prefix_table = batch.prefix_block_ids[slice(*batch.prefix_block_starts[group : group + 2])]
        for sequence in range(*batch.group_starts[group : group + 2]):
            first_row, last_row = batch.cu_seqlens_q[sequence : sequence + 2].tolist()
            table = batch.suffix_block_table[slice(*batch.suffix_block_starts[sequence : sequence + 2])]
            suffix_len = int(batch.suffix_lens[sequence])
            end = prefix_len + suffix_len
            positions = torch.arange(end - (last_row - first_row), end)
            begin = max(0, int(positions[0]) - window + 1) if window else 0
            slots = np.concatenate(
                [
                    _slots(prefix_table, min(begin, prefix_len), prefix_len, batch.block_size),
                    _slots(table, max(0, begin - prefix_len), suffix_len, batch.block_size),
                ]
            )
            # [num_kv_heads, 1, L, head_dim] against [num_kv_heads, group_size, n, head_dim].
            key, value = (
                cache.flatten(0, 1)[torch.from_numpy(slots)].float().transpose(0, 1).unsqueeze(1)
                for cache in (k_cache, v_cache)
            )
            rows = query[first_row:last_row].float().view(len(positions), num_kv_heads, -1, head_dim)
            scores = rows.permute(1, 2, 0, 3) @ key.transpose(-1, -2) * scoring.scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            seen = torch.arange(begin, end)
            is_hidden = seen > positions[:, None]
            if window:
                is_hidden |= seen <= positions[:, None] - window
            scores = scores.masked_fill(is_hidden, -torch.inf)
            if sinks is not None:  # a column of scores whose value is 0
                sink = sinks.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
                weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
            else:
                weights = scores.softmax(dim=-1)
            out[first_row:last_row] = (weights @ value).permute(2, 0, 1, 3).reshape(len(positions), -1, head_dim)
    return out


def _slots(table: npt.NDArray[np.int32], begin: int, end: int, block_size: int) -> npt.NDArray[np.int64]:
    """Slots in a cache of tokens [begin, end) of a block table."""
    first = begin // block_size
    blocks = table[first : cdiv(end, block_size)].astype(np.int64)
    slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return slots[begin - first * block_size : end - first * block_size]
