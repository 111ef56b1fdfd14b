"""The attention of a step by each compared implementation; work that all layers share is prepared beforehand."""

import importlib.util
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.kernels.attention_step import BLOCK_SIZE, HEADS, Step
from engine.kernels.scoring import Scoring
from engine.kernels.triton.device_work import WorkCapacity
from engine.kernels.triton.relay import RelayAttention
from engine.kernels.triton.triton_attention import PagedAttention, TritonAttention
from engine.kernels.triton.tuned import Launch

Attend = Callable[[], torch.Tensor]
Prepare = Callable[[], Attend]

BACKENDS = (TritonAttention, RelayAttention, PagedAttention)
OURS = tuple(kind.name for kind in BACKENDS)


def ours(kind: type[TritonAttention], step: Step) -> Attend:
    """A Triton backend; the work list of a step is prepared beforehand, as for all layers of a model."""
    backend = _backend(kind, step)
    work = backend.prepare(step.batch)
    return partial(backend.attend, step.query, step.k_cache, step.v_cache, work, Scoring(scale=step.scale))


def every_launch(step: Step) -> Iterator[tuple[str, Prepare]]:
    """Each Triton backend with each of its tuned launches, not only the one that it would choose."""
    for kind in BACKENDS:
        backend = _backend(kind, step)
        for launch in backend.tuned.launches:
            yield f"{backend.name}, {launch.name}", partial(_launched, backend, launch, step)


def _launched(backend: TritonAttention, launch: Launch, step: Step) -> Attend:
    work_list = backend.plan(step.batch, (launch,))
    work = backend.reserve(WorkCapacity.of(work_list), launch)
    work.fill(work_list, step.batch.slot_mapping)
    return partial(backend.attend, step.query, step.k_cache, step.v_cache, work, Scoring(scale=step.scale))


def _backend(kind: type[TritonAttention], step: Step) -> TritonAttention:
    num_q_heads, num_kv_heads, head_dim = HEADS[step.case.model]
    return kind(
        num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16,
        block_size=BLOCK_SIZE, device=step.query.device,
    )  # fmt: skip


def sdpa(step: Step) -> Attend:
    """torch's SDPA: one call for decode requests, one for prefill chunks of one length; KV is gathered beforehand."""
    batch, case = step.batch, step.case
    group = np.repeat(np.arange(batch.num_groups), np.diff(batch.group_starts))
    gathered = []
    for cache in (step.k_cache, step.v_cache):
        prefixes, owns = step.parts(cache)
        gathered.append([torch.cat([prefixes[g], own]) for g, own in zip(group, owns, strict=True)])
    calls = []
    for first, last, rows in ((0, case.num_decode, 1), (case.num_decode, len(group), case.prefill_rows)):
        if first < last:
            key, value = (torch.stack(kv[first:last]).transpose(1, 2).contiguous() for kv in gathered)
            query_rows = step.query[batch.cu_seqlens_q[first] : batch.cu_seqlens_q[last]]
            query = query_rows.unflatten(0, (last - first, rows)).transpose(1, 2)
            mask = causal_lower_right(rows, key.shape[2]) if rows > 1 else None
            if mask is not None and query.device.type == "cpu":
                mask = torch.ones(rows, key.shape[2], dtype=torch.bool).tril(key.shape[2] - rows)
            groups = query.shape[1] // key.shape[1]
            if mask is not None:
                key, value = (kv.repeat_interleave(groups, dim=1) for kv in (key, value))
            calls.append((query, key, value, mask))

    def attend() -> torch.Tensor:
        outs = [
            scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=step.scale, enable_gqa=mask is None)
            for query, key, value, mask in calls
        ]
        return torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outs])

    return attend


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A freshly compiled function, independent of what was compiled before.

    torch compiles eight variants of a function and runs further ones uncompiled; uncompiled FlexAttention holds all
    scores in memory.
    """
    torch.compiler.reset()
    return torch.compile(function, dynamic=False, **options)


def flex(step: Step) -> Attend:
    """FlexAttention: one call over all KV in one sequence; with the block mask, a block of rows reads a prefix once."""
    batch, device = step.batch, step.query.device
    key, value = (
        torch.cat([*prefixes, *owns]).transpose(0, 1)[None]
        for prefixes, owns in (step.parts(step.k_cache), step.parts(step.v_cache))
    )
    num_rows, members = np.diff(batch.cu_seqlens_q), np.diff(batch.group_starts)
    sequence = np.repeat(np.arange(len(batch.suffix_lens)), num_rows)
    group = np.repeat(np.arange(batch.num_groups), members)[sequence]
    own_position = np.arange(batch.num_rows) - batch.cu_seqlens_q[sequence] + (batch.suffix_lens - num_rows)[sequence]
    # Owner of each packed token (group g: g, sequence s: num_groups + s), and its position in the owner's KV.
    lengths = np.concatenate([batch.prefix_lens, batch.suffix_lens])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(owner)) - (np.cumsum(lengths) - lengths)[owner]
    row_group, row_owner, row_place, kv_owner, kv_place = (
        torch.from_numpy(values.astype(np.int32)).to(device)
        for values in (group, batch.num_groups + sequence, own_position, owner, place)
    )

    def is_visible(_b: torch.Tensor, _h: torch.Tensor, row: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        is_prefix = kv_owner[kv] == row_group[row]
        return is_prefix | ((kv_owner[kv] == row_owner[row]) & (kv_place[kv] <= row_place[row]))

    make_mask, call = create_block_mask, flex_attention
    if device.type == "cuda":
        make_mask = compiled(create_block_mask)
        call = compiled(flex_attention, fullgraph=True)
    mask = make_mask(is_visible, None, None, batch.num_rows, len(owner), device=device.type)
    query = step.query.transpose(0, 1)[None]

    def attend() -> torch.Tensor:
        out = call(query, key, value, block_mask=mask, scale=step.scale, enable_gqa=True)
        return out[0].transpose(0, 1)

    return attend


def flashinfer_cascade(step: Step) -> Attend:
    """FlashInfer's cascade of two levels: every group's prefix, then every sequence's own KV."""
    import flashinfer

    batch, device = step.batch, step.query.device
    num_q_heads, num_kv_heads, head_dim = HEADS[step.case.model]

    def moved(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.int32)).to(device)

    def last_page(lengths: np.ndarray) -> torch.Tensor:
        return moved((lengths - 1) % BLOCK_SIZE + 1)

    workspace = torch.empty(512 * 2**20, dtype=torch.uint8, device=device)
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")
    wrapper.plan(
        [moved(batch.cu_seqlens_q[batch.group_starts]), moved(batch.cu_seqlens_q)],
        [moved(batch.prefix_block_starts), moved(batch.suffix_block_starts)],
        [moved(batch.prefix_block_ids), moved(batch.suffix_block_table)],
        [last_page(batch.prefix_lens), last_page(batch.suffix_lens)],
        num_q_heads, num_kv_heads, head_dim, BLOCK_SIZE, causal=True, sm_scale=step.scale, q_data_type=torch.bfloat16,
    )  # fmt: skip
    cache = torch.stack([step.k_cache, step.v_cache], dim=1)
    return partial(wrapper.run, step.query, cache)


PEERS = {"sdpa": sdpa, "flex": flex, "flashinfer": flashinfer_cascade}
NAMES = (*OURS, *PEERS)
QUICK = tuple(name for name in NAMES if name != "flex")
"""Those that torch does not compile for each case, which takes ten seconds or more."""


def implementations(step: Step, names: Collection[str]) -> Iterator[tuple[str, Prepare]]:
    """By name, the function that prepares each named implementation; FlashInfer only if it is installed."""
    prepare = {kind.name: partial(ours, kind) for kind in BACKENDS} | PEERS
    for name in NAMES:
        if name in names and (name != "flashinfer" or importlib.util.find_spec(name)):
            yield name, partial(prepare[name], step)
