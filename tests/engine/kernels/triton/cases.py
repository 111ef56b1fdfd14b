"""Steps for Triton's interpreter: shapes and sizes, and their tensors.

Everything that must not be read (unused blocks, unwritten slots) is NaN, and guard values surround queries and caches.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from benchmarks.kernels.attention_batches import GroupSize
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.triton.relay import RelayAttention
from engine.kernels.triton.triton_attention import PagedAttention, TritonAttention

GUARD = 77.0
BACKENDS = {backend.name: backend for backend in (TritonAttention, PagedAttention, RelayAttention)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One step, the model's shape, and which backends compute it.

    Attributes:
        num_orders: in how many orders the tiles run; the interpreter runs programs one after the other, so that an
            order in which a merge came too early would show.
        launch: force one of the tuned launches; "" leaves the choice to the cost model.
    """

    name: str
    groups: Sequence[GroupSize]
    backends: Sequence[str] = ("fused",)
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float = 0.0
    window: int = 0
    has_sinks: bool = False
    num_orders: int = 1
    launch: str = ""


def decode(prefix_len: int, suffix_lens: Sequence[int]) -> GroupSize:
    return GroupSize(prefix_len=prefix_len, members=[(own_len, 1) for own_len in suffix_lens])


MIXED = (
    decode(37, (5, 17, 1)),
    GroupSize(prefix_len=48, members=[(9, 1), (21, 4)]),
    GroupSize(prefix_len=0, members=[(11, 11)]),
)
PACKED = (
    decode(37, [1 + 5 * i % 36 for i in range(24)]),
    *(decode(0, (own_len,)) for own_len in (1, 15, 16, 17, 31, 33, 40, 2)),
    decode(16, (3, 16, 5, 32)),
)
"""Many short own parts, more than the device of the interpreter's configuration has programs."""
_ALL = ("fused", "paged", "relay")

CASES = (
    Case(
        name="sizes around a block",
        groups=[decode(prefix_len, (1, 15, 16, 17)) for prefix_len in (0, 1, 15, 16, 17)],
        backends=_ALL, num_q_heads=1, num_kv_heads=1,
    ),
    *(
        Case(name=f"group of {size}", groups=[decode(40, [1 + i % 3 for i in range(size)])],
             backends=("fused", "relay"), num_kv_heads=1, num_orders=num_orders)
        for size, num_orders in ((1, 1), (2, 1), (7, 4))
    ),
    Case(name="group of 64", groups=[decode(40, [1 + i % 3 for i in range(64)])], num_q_heads=4, num_kv_heads=1),
    *(
        Case(name=f"head dim {head_dim} {str(dtype)[6:]}", groups=MIXED, head_dim=head_dim, dtype=dtype)
        for head_dim, dtype in (
            (16, torch.float32), (64, torch.bfloat16), (96, torch.float16), (96, torch.float32), (128, torch.bfloat16),
            (256, torch.float16),
        )
    ),
    *(
        Case(name=f"{size} query heads a KV head", groups=MIXED[:2], num_q_heads=size * kv, num_kv_heads=kv)
        for size, kv in ((1, 3), (3, 1), (5, 1), (7, 2), (16, 1))
    ),
    *(
        Case(name=f"block of {size}", groups=[decode(size + 3, (1, size, size + 1)), decode(2 * size, (size - 1,))],
             backends=("fused", "paged"), num_q_heads=2, num_kv_heads=1, block_size=size)
        for size in (32, 64, 128)
    ),
    Case(
        name="long chunks, wide tiles",
        groups=[
            GroupSize(prefix_len=21, members=[(70, 45), (4, 1)]),
            GroupSize(prefix_len=0, members=[(33, 33)]),
            GroupSize(prefix_len=32, members=[(40, 20), (33, 1)]),
        ],
        backends=_ALL, num_q_heads=3, num_kv_heads=1, launch="mixed",
    ),
    Case(name="splits of a long prefix", groups=[decode(300, (3, 1))], backends=_ALL, num_q_heads=3,
         num_kv_heads=1, num_orders=3),
    Case(name="splits of long own parts", groups=[decode(0, (280,)), decode(19, (150, 2))], backends=_ALL,
         num_q_heads=3, num_kv_heads=1, num_orders=3, launch="decode"),
    Case(name="a window", groups=[decode(50, (3, 20, 41)), GroupSize(prefix_len=0, members=[(45, 12)])], backends=_ALL,
         window=18),
    Case(name="a window shorter than a block", groups=[decode(64, (1, 17)), decode(0, (100,))], window=5),
    Case(name="a window over split ranges", groups=[decode(300, (3, 1)), decode(0, (200,))], window=100,
         num_orders=2),
    Case(name="a window behind several split ranges", groups=[decode(600, (3, 1)), decode(0, (500,))], num_q_heads=3,
         num_kv_heads=1, window=5),
    Case(name="a soft cap", groups=MIXED, backends=_ALL, num_kv_heads=1, softcap=3.0),
    Case(name="sinks, merged or not", groups=MIXED, backends=_ALL, has_sinks=True),
    Case(name="sinks over split ranges", groups=[decode(300, (3, 1))], num_q_heads=3, num_kv_heads=1,
         has_sinks=True, num_orders=2),
    Case(name="packed own parts", groups=PACKED, num_kv_heads=1, num_orders=2, launch="decode"),
    Case(name="packed own parts, a window, a soft cap and sinks", groups=PACKED, num_q_heads=2, num_kv_heads=1,
         head_dim=96, block_size=32, dtype=torch.bfloat16, window=12, softcap=3.0, has_sinks=True),
    Case(name="a soft cap and a window", groups=MIXED, softcap=2.0, window=30, head_dim=96),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Tensors of one layer: views into larger, guarded ones, so that nothing is contiguous."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor


def make_inputs(case: Case, batch: AttentionBatch, num_blocks: int, seed: int) -> Inputs:
    """KV that belongs to the step is random; every other slot is NaN, this step's own rows included."""
    generator = torch.Generator().manual_seed(seed)
    cache_shape = (num_blocks, case.block_size, case.num_kv_heads + 1, case.head_dim)
    is_known = torch.zeros(num_blocks * case.block_size, dtype=torch.bool)
    for ids, starts, lengths in (
        (batch.prefix_block_ids, batch.prefix_block_starts, batch.prefix_lens),
        (batch.suffix_block_table, batch.suffix_block_starts, batch.suffix_lens),
    ):
        for first, last, length in zip(starts[:-1], starts[1:], lengths, strict=True):
            slots = torch.from_numpy(ids[first:last].astype(np.int64))[:, None] * case.block_size
            is_known[(slots + torch.arange(case.block_size)).reshape(-1)[:length]] = True
    is_known[torch.from_numpy(batch.slot_mapping)] = False

    def guarded(num_heads: int) -> torch.Tensor:
        rows = torch.full((batch.num_rows, num_heads + 2, case.head_dim + 8), GUARD, dtype=case.dtype)
        rows = rows[:, 1:-1, : case.head_dim]
        rows.copy_(torch.randn(rows.shape, generator=generator))
        return rows

    caches = []
    for _ in range(2):
        cache = torch.randn(cache_shape, generator=generator).to(case.dtype)
        cache.view(-1, *cache_shape[2:])[~is_known] = torch.nan
        caches.append(cache[:, :, : case.num_kv_heads])
    return Inputs(
        query=guarded(case.num_q_heads), key=guarded(case.num_kv_heads), value=guarded(case.num_kv_heads),
        k_cache=caches[0], v_cache=caches[1],
    )  # fmt: skip


def make_backend(case: Case, name: str) -> TritonAttention:
    return BACKENDS[name](
        num_q_heads=case.num_q_heads, num_kv_heads=case.num_kv_heads, head_dim=case.head_dim, dtype=case.dtype,
        block_size=case.block_size, device=torch.device("cpu"),
    )  # fmt: skip
