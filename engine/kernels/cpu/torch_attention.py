"""Prefix-shared attention on the CPU: torch's fused attention over ragged parts, merged by log-sum-exp.

A row's attention splits exactly into a part over its group's prefix and a part over its own KV
(RelayAttention section 3.2; BatchLLM Eq. 1). The prefix part is one call per group: the queries of all members, with
the query heads of one KV head packed into the rows, against the prefix's KV, which is read once. The own part is one
call per long chunk, and one per bucket of decode tokens and short chunks of similar shape, so that no row is padded to
the longest sequence. Log-sum-exps are natural; partial results are merged in fp32.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels import cdiv
from engine.kernels.attention_backend import AttentionBackend
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.cpu.sequence_attention import attend_by_sequence
from engine.kernels.draw import draw_tokens
from engine.kernels.scoring import Scoring

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

LONGEST_BUCKETED_CHUNK = 32
"""A chunk of more rows has a call of its own: its products are large enough to pay for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Rows of the batch against the KV tokens `tokens` of `blocks`.

    Attributes:
        is_causal: whether row i sees tokens 0..i only; else every row sees all tokens.
        earlier: further tokens that the same rows see.
    """

    rows: slice
    tokens: slice
    blocks: slice | torch.Tensor
    is_causal: bool = False
    earlier: "_Part | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bucket:
    """R sequences of at most n rows and L own tokens.

    Attributes:
        rows: int64 ``[R * n]``; a shorter chunk is padded with its last row.
        kept: int64, the entries of `rows` that are not padding; None if all are kept.
        blocks: int64 ``[R * L / block_size]``; a shorter sequence is padded with any block, which the mask hides.
        mask: ``[R, 1, n * group_size, L]``, 0 or -inf.
    """

    num_sequences: int
    num_tokens: int
    rows: torch.Tensor
    kept: torch.Tensor | None
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuWork:
    """One step's attention, prepared once and used by every layer."""

    batch: AttentionBatch
    slots: torch.Tensor
    prefixes: tuple[_Part, ...]
    long_chunks: tuple[_Part, ...]
    buckets: tuple[_Bucket, ...]


class CpuAttention(AttentionBackend):
    """An attention backend in plain torch; the model keeps its own layers and output layer.

    Args:
        num_q_heads: a multiple of num_kv_heads.
        dtype: of queries and of the KV cache.
    """

    name = "torch"

    def __init__(self, *, num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.num_kv_heads = num_kv_heads
        self.group_size = num_q_heads // num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self._workspace = torch.empty(0, dtype=dtype)

    draw_tokens = staticmethod(draw_tokens)

    def prepare(self, batch: AttentionBatch) -> CpuWork:
        """Turns a step's description into slices, indices and masks. Called once per step."""
        row_starts = batch.cu_seqlens_q[batch.group_starts].tolist()
        prefixes = [
            _Part(
                rows=slice(*row_starts[group : group + 2]),
                tokens=slice(int(batch.prefix_lens[group])),
                blocks=_index(batch.prefix_block_ids[slice(*batch.prefix_block_starts[group : group + 2])]),
            )
            for group in np.flatnonzero(batch.prefix_lens).tolist()
        ]
        num_rows = np.diff(batch.cu_seqlens_q)
        is_long = num_rows > LONGEST_BUCKETED_CHUNK
        return CpuWork(
            batch=batch,
            slots=torch.from_numpy(batch.slot_mapping),
            prefixes=tuple(prefixes),
            long_chunks=tuple(_long_chunk(batch, sequence) for sequence in np.flatnonzero(is_long).tolist()),
            buckets=tuple(self._buckets(batch, num_rows)),
        )

    def attend(
        self, query: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, work: CpuWork, scoring: Scoring
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`."""
        if not scoring.is_plain:
            return attend_by_sequence(query, k_cache, v_cache, work.batch, scoring)
        scale = scoring.scale
        num_rows = query.shape[0]
        by_head = (self.num_kv_heads, num_rows, self.group_size, self.head_dim)
        packed = query.reshape(num_rows, *by_head[:1], *by_head[2:]).transpose(0, 1).contiguous()
        out = torch.empty(by_head, dtype=query.dtype)
        lse = torch.empty(by_head[:3], dtype=torch.float32)
        for part in work.long_chunks:
            out[:, part.rows], lse[:, part.rows] = self._attend_part(packed, k_cache, v_cache, part, scale)
        for bucket in work.buckets:
            self._attend_bucket(packed, (k_cache, v_cache), bucket, scale, out, lse)
        if work.prefixes:
            first, last = work.prefixes[0].rows.start, work.prefixes[-1].rows.stop
            shared = torch.empty((by_head[0], last - first, *by_head[2:]), dtype=query.dtype)
            shared_lse = torch.full(shared.shape[:3], -torch.inf, dtype=torch.float32)
            if sum(part.rows.stop - part.rows.start for part in work.prefixes) < last - first:
                shared.zero_()
            for part in work.prefixes:
                rows = slice(part.rows.start - first, part.rows.stop - first)
                shared[:, rows], shared_lse[:, rows] = self._attend_part(packed, k_cache, v_cache, part, scale)
            out[:, first:last] = _merge(out[:, first:last], lse[:, first:last], shared, shared_lse)
        return out.transpose(0, 1).reshape(query.shape)

    def _attend_part(
        self, packed: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, part: _Part, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A part merged with its earlier part: out ``[Hkv, n, G, D]``, lse ``[Hkv, n, G]``."""
        query = packed[:, part.rows]
        key, value = (_read(cache, part.blocks)[part.tokens].transpose(0, 1) for cache in (k_cache, v_cache))
        if not part.is_causal:
            key, value = key.unsqueeze(0), value.unsqueeze(0)
            out, lse = _flash(query.flatten(1, 2).unsqueeze(0), key, value, 0.0, False, scale=scale)
            return out.view(query.shape), lse.view(query.shape[:3])
        # KV heads are the batch dimension: the query heads of one share its keys by a zero stride.
        query = query.permute(0, 2, 1, 3)
        key, value = key.unsqueeze(1).expand_as(query), value.unsqueeze(1).expand_as(query)
        out, lse = _flash(query, key, value, 0.0, True, scale=scale)
        out, lse = out.permute(0, 2, 1, 3), lse.transpose(1, 2)
        if part.earlier is not None:
            earlier, earlier_lse = self._attend_part(packed, k_cache, v_cache, part.earlier, scale)
            out, lse = _merge(out, lse, earlier, earlier_lse), torch.logaddexp(lse, earlier_lse)
        return out, lse

    def _attend_bucket(
        self, packed: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], bucket: _Bucket, scale: float,
        out: torch.Tensor, lse: torch.Tensor,
    ) -> None:  # fmt: skip
        num_heads, _, group_size, head_dim = packed.shape
        shape = (num_heads, bucket.num_sequences, -1, head_dim)
        query = packed.index_select(1, bucket.rows).view(shape).transpose(0, 1)
        kv_shape = (bucket.num_sequences, bucket.num_tokens, num_heads, head_dim)
        key, value = (gathered.view(kv_shape).transpose(1, 2) for gathered in self._gather(*caches, bucket.blocks))
        own, own_lse = _flash(query, key, value, 0.0, False, attn_mask=bucket.mask, scale=scale)
        own = own.transpose(0, 1).reshape(num_heads, -1, group_size, head_dim)
        own_lse = own_lse.transpose(0, 1).reshape(num_heads, -1, group_size)
        rows = bucket.rows
        if bucket.kept is not None:
            rows = rows[bucket.kept]
            own, own_lse = own.index_select(1, bucket.kept), own_lse.index_select(1, bucket.kept)
        out.index_copy_(1, rows, own)
        lse.index_copy_(1, rows, own_lse)

    def _gather(
        self, k_cache: torch.Tensor, v_cache: torch.Tensor, blocks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies blocks into memory that is reused by every call: fresh pages would cost more than the copy."""
        size = len(blocks) * k_cache[0].numel()
        if self._workspace.numel() < 2 * size:
            self._workspace = torch.empty(2 * size, dtype=k_cache.dtype)
        key = self._workspace[:size].view(len(blocks), *k_cache.shape[1:])
        value = self._workspace[size : 2 * size].view(len(blocks), *k_cache.shape[1:])
        torch.index_select(k_cache, 0, blocks, out=key)
        torch.index_select(v_cache, 0, blocks, out=value)
        return key, value

    def _buckets(self, batch: AttentionBatch, num_rows: npt.NDArray[np.int32]) -> Iterator[_Bucket]:
        """Groups short chunks by rounded shape: rows up to a power of two, blocks by a quarter at most."""
        members: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        num_blocks = cdiv(batch.suffix_lens, batch.block_size)
        short = np.flatnonzero(num_rows <= LONGEST_BUCKETED_CHUNK)
        for sequence, rows, blocks in zip(
            short.tolist(), num_rows[short].tolist(), num_blocks[short].tolist(), strict=True
        ):
            members[1 << (rows - 1).bit_length(), _rounded_blocks(blocks)].append(sequence)
        for (_, most_blocks), sequences in members.items():
            yield self._bucket(batch, np.array(sequences), num_rows, most_blocks)

    def _bucket(
        self, batch: AttentionBatch, sequences: npt.NDArray[np.int64], num_rows: npt.NDArray[np.int32], most_blocks: int
    ) -> _Bucket:
        counts = num_rows[sequences].astype(np.int64)
        most_rows = int(counts.max())
        suffix_lens = batch.suffix_lens[sequences].astype(np.int64)
        row = np.minimum(np.arange(most_rows), counts[:, None] - 1)
        rows = batch.cu_seqlens_q[sequences].astype(np.int64)[:, None] + row
        last_block = batch.suffix_block_starts[sequences + 1] - 1
        entry = np.minimum(batch.suffix_block_starts[sequences][:, None] + np.arange(most_blocks), last_block[:, None])
        num_tokens = most_blocks * batch.block_size
        num_visible = suffix_lens[:, None] - counts[:, None] + row + 1
        is_hidden = np.arange(num_tokens) >= num_visible[:, :, None]
        mask = torch.zeros((len(sequences), most_rows, num_tokens), dtype=self.dtype)
        mask.masked_fill_(torch.from_numpy(is_hidden), -torch.inf)
        is_kept = np.arange(most_rows) < counts[:, None]
        return _Bucket(
            num_sequences=len(sequences),
            num_tokens=num_tokens,
            rows=torch.from_numpy(rows.reshape(-1)),
            kept=None if is_kept.all() else torch.from_numpy(np.flatnonzero(is_kept)),
            blocks=torch.from_numpy(batch.suffix_block_table[entry.reshape(-1)].astype(np.int64)),
            mask=mask.repeat_interleave(self.group_size, dim=1).unsqueeze(1),
        )


def _long_chunk(batch: AttentionBatch, sequence: int) -> _Part:
    first_row, last_row = batch.cu_seqlens_q[sequence : sequence + 2].tolist()
    table = batch.suffix_block_table[slice(*batch.suffix_block_starts[sequence : sequence + 2])]
    rows, num_rows = slice(first_row, last_row), last_row - first_row
    num_earlier = int(batch.suffix_lens[sequence]) - num_rows
    first_block, offset = divmod(num_earlier, batch.block_size)
    earlier = None
    if num_earlier:
        blocks = _index(table[: cdiv(num_earlier, batch.block_size)])
        earlier = _Part(rows=rows, tokens=slice(num_earlier), blocks=blocks)
    tokens = slice(offset, offset + num_rows)
    return _Part(rows=rows, tokens=tokens, blocks=_index(table[first_block:]), is_causal=True, earlier=earlier)


def _read(cache: torch.Tensor, blocks: slice | torch.Tensor) -> torch.Tensor:
    """The KV of blocks, ``[tokens, Hkv, D]``: a view of consecutive blocks, else a copy."""
    taken = cache[blocks] if isinstance(blocks, slice) else cache.index_select(0, blocks)
    return taken.view(-1, *cache.shape[2:])


def _index(table: npt.NDArray[np.int32]) -> slice | torch.Tensor:
    """A block table as an index into a cache: a slice if its blocks are consecutive."""
    first = int(table[0])
    if int(table[-1]) - first == len(table) - 1 and (np.diff(table) == 1).all():
        return slice(first, first + len(table))
    return torch.from_numpy(table.astype(np.int64))


def _rounded_blocks(num_blocks: int) -> int:
    """Rounds up to one of 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, ...: by a quarter at most."""
    step = 1 << max(0, num_blocks.bit_length() - 3)
    return cdiv(num_blocks, step) * step


def _merge(out: torch.Tensor, lse: torch.Tensor, other: torch.Tensor, other_lse: torch.Tensor) -> torch.Tensor:
    """Merges two partial results over disjoint KV (BatchLLM Eq. 1): weighted by exp(lse), normalised, in fp32."""
    weight = torch.sigmoid(other_lse - lse).unsqueeze(-1)
    return torch.lerp(out.float(), other.float(), weight).to(out.dtype)
