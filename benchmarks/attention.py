"""Attention kernels on a GPU, on the grid of BatchLLM's Fig. 8:  python -m benchmarks.attention [--out FILE]

Grid: shared prefix of 256, 1,024, 4,096 tokens; own part of 128, 512, 2,048; 4, 16 or all requests per prefix; 32 or
256 decode requests, or 256 decode requests with 7 prefill chunks of 256 tokens beside them; heads of Llama-3-8B (32/8
of 128) and Qwen2-7B (28/4 of 128); bf16, blocks of 16 tokens at random places.

Compared: fused (ours), relay (three launches), plain paged, torch's SDPA (each request's KV gathered beforehand, free
of charge) and FlexAttention (one packed KV, a block mask that shares prefixes), FlashInfer's cascade where it is
installed. Beside each: RelayAttention's Eq. 10, and the share of the bandwidth and of the matrix rate that a copy and a
product reach in the same run.

Every implementation must first agree with float64 on every case; one that does not gets no time, and one of ours that
does not ends the run. Without a GPU nothing is measured, and the program says so; `--check` runs the comparison alone,
small, on any machine (with TRITON_INTERPRET=1 where there is no GPU).
"""

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_batches import GroupSize, make_batch
from benchmarks.gpu import Ceilings, GpuRun, measure_ceilings, median_us, require_gpu
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.fused import FusedAttention
from engine.kernels.paged import PagedAttention
from engine.kernels.reference import paged_attention_ref
from engine.kernels.relay import RelayAttention

HEADS = {"Llama-3-8B": (32, 8, 128), "Qwen2-7B": (28, 4, 128)}
BLOCK_SIZE = 16
OURS = ("fused", "relay", "paged")
Attend = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One point of the grid. num_members divides num_decode; the prefill chunks have prefixes of their own."""

    model: str
    prefix_len: int
    own_len: int
    num_members: int
    num_decode: int
    num_prefill: int
    prefill_rows: int

    def groups(self) -> list[GroupSize]:
        decode = GroupSize(prefix_len=self.prefix_len, members=[(self.own_len, 1)] * self.num_members)
        prefill = GroupSize(prefix_len=self.prefix_len, members=[(self.prefill_rows, self.prefill_rows)])
        return [decode] * (self.num_decode // self.num_members) + [prefill] * self.num_prefill

    def relay_equation_10(self) -> float:
        """RelayAttention's speedup over plain attention, by elements moved: one query head per KV head, decode only."""
        s, c, b = self.prefix_len, self.own_len, self.num_members
        return (s + c + 2) / (s / b + c + 7)


def grid() -> Iterator[Case]:
    for model in HEADS:
        for num_decode, num_prefill in ((32, 0), (256, 0), (256, 7)):
            for prefix_len in (256, 1024, 4096):
                for own_len in (128, 512, 2048):
                    for num_members in (4, 16, num_decode):
                        yield Case(
                            model=model, prefix_len=prefix_len, own_len=own_len, num_members=num_members,
                            num_decode=num_decode, num_prefill=num_prefill, prefill_rows=256,
                        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A case's tensors, and the least that any implementation must do for it.

    Attributes:
        num_bytes: every KV token once, queries, outputs.
        num_flops: two products over what each row sees.
    """

    case: Case
    batch: AttentionBatch
    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    num_bytes: int
    num_flops: int

    @classmethod
    def make(cls, case: Case, device: torch.device) -> "Step":
        num_q_heads, num_kv_heads, head_dim = HEADS[case.model]
        batch, num_blocks = make_batch(case.groups(), BLOCK_SIZE)
        options = {"dtype": torch.bfloat16, "device": device}
        query = torch.randn(batch.num_rows, num_q_heads, head_dim, **options)
        caches = [torch.randn(num_blocks, BLOCK_SIZE, num_kv_heads, head_dim, **options) for _ in range(2)]
        rows = np.diff(batch.query_starts).astype(np.int64)
        prefixes = batch.prefix_lens[np.repeat(np.arange(batch.num_groups), np.diff(batch.group_starts))]
        seen = rows * (prefixes + batch.own_lens - rows) + rows * (rows + 1) // 2
        num_kv_tokens = int(batch.own_lens.sum() + batch.prefix_lens.sum())
        return cls(
            case=case, batch=batch, query=query, k_cache=caches[0], v_cache=caches[1],
            num_bytes=2 * query.nbytes + 2 * num_kv_tokens * num_kv_heads * head_dim * query.itemsize,
            num_flops=4 * int(seen.sum()) * num_q_heads * head_dim,
        )  # fmt: skip

    @property
    def scale(self) -> float:
        return float(self.query.shape[-1] ** -0.5)

    def tokens(
        self, cache: torch.Tensor, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> list[torch.Tensor]:
        """The KV ``[length, num_kv_heads, head_dim]`` of each table."""
        return [
            cache[torch.from_numpy(ids[first:last].astype(np.int64)).to(cache.device)].flatten(0, 1)[:length]
            for first, last, length in zip(starts[:-1], starts[1:], lengths, strict=True)
        ]

    def parts(self, cache: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The KV of every prefix, and of every sequence's own part."""
        batch = self.batch
        return (
            self.tokens(cache, batch.prefix_block_ids, batch.prefix_block_starts, batch.prefix_lens),
            self.tokens(cache, batch.own_block_ids, batch.own_block_starts, batch.own_lens),
        )


def ours(step: Step) -> Iterator[tuple[str, Attend]]:
    """The three Triton backends; a step's work is prepared beforehand, as it is for all layers of a model."""
    num_q_heads, num_kv_heads, head_dim = HEADS[step.case.model]
    for kind in (FusedAttention, RelayAttention, PagedAttention):
        backend = kind(
            num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=torch.bfloat16,
            block_size=BLOCK_SIZE, device=step.query.device,
        )  # fmt: skip
        work = backend.prepare(step.batch)
        yield kind.name, partial(backend.attend, step.query, step.k_cache, step.v_cache, work, scale=step.scale)


def sdpa(step: Step) -> Attend:
    """One call for the decode requests, one for the prefill chunks, each of one length; KV gathered beforehand."""
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
            query_rows = step.query[batch.query_starts[first] : batch.query_starts[last]]
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


def flex(step: Step) -> Attend:
    """One call over all KV packed in a row; the block mask lets a prefix's KV be read once a block of rows."""
    batch, device = step.batch, step.query.device
    key, value = (
        torch.cat([*prefixes, *owns]).transpose(0, 1)[None]
        for prefixes, owns in (step.parts(step.k_cache), step.parts(step.v_cache))
    )
    num_rows, members = np.diff(batch.query_starts), np.diff(batch.group_starts)
    sequence = np.repeat(np.arange(batch.num_sequences), num_rows)
    group = np.repeat(np.arange(batch.num_groups), members)[sequence]
    own_position = np.arange(batch.num_rows) - batch.query_starts[sequence] + (batch.own_lens - num_rows)[sequence]
    # Each packed token's owner: group g is g, sequence s is num_groups + s; and its place in the owner's KV.
    lengths = np.concatenate([batch.prefix_lens, batch.own_lens])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(len(owner)) - (np.cumsum(lengths) - lengths)[owner]
    row_group, row_owner, row_place, kv_owner, kv_place = (
        torch.from_numpy(values.astype(np.int32)).to(device)
        for values in (group, batch.num_groups + sequence, own_position, owner, place)
    )

    def is_visible(_b: torch.Tensor, _h: torch.Tensor, row: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        is_prefix = kv_owner[kv] == row_group[row]
        return is_prefix | ((kv_owner[kv] == row_owner[row]) & (kv_place[kv] <= row_place[row]))

    is_gpu = device.type == "cuda"
    mask = create_block_mask(is_visible, None, None, batch.num_rows, len(owner), device=device.type, _compile=is_gpu)
    call = torch.compile(flex_attention, dynamic=False) if is_gpu else flex_attention
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
        [moved(batch.query_starts[batch.group_starts]), moved(batch.query_starts)],
        [moved(batch.prefix_block_starts), moved(batch.own_block_starts)],
        [moved(batch.prefix_block_ids), moved(batch.own_block_ids)],
        [last_page(batch.prefix_lens), last_page(batch.own_lens)],
        num_q_heads, num_kv_heads, head_dim, BLOCK_SIZE, causal=True, sm_scale=step.scale, q_data_type=torch.bfloat16,
    )  # fmt: skip
    cache = torch.stack([step.k_cache, step.v_cache], dim=1)
    return partial(wrapper.run, step.query, cache)


def implementations(step: Step) -> Iterator[tuple[str, Attend]]:
    yield from ours(step)
    yield "sdpa", sdpa(step)
    yield "flex", flex(step)
    if importlib.util.find_spec("flashinfer"):
        yield "flashinfer", flashinfer_cascade(step)


def gated(step: Step) -> Iterator[tuple[str, Attend | str]]:
    """Each implementation that agrees with float64; of one that does not, why there is no time.

    Raises:
        SystemExit: one of ours is wrong.
    """
    expected = paged_attention_ref(
        step.query.double(), step.k_cache.double(), step.v_cache.double(), step.batch, scale=step.scale
    )
    for name, attend in implementations(step):
        error = float((attend().double() - expected).abs().max())
        if error < GpuRun.tolerance(torch.bfloat16):
            yield name, attend
        elif name in OURS:
            raise SystemExit(f"benchmarks.attention: {name} is wrong by {error} on {step.case}: no figures")
        else:
            yield name, f"no time: differs from float64 by {error}"


def measure(case: Case, run: GpuRun, ceilings: Ceilings) -> dict[str, Any]:
    step = Step.make(case, run.device)
    times: dict[str, float | str] = {
        name: attend if isinstance(attend, str) else median_us(attend) for name, attend in gated(step)
    }
    fused_us = float(times["fused"])
    return asdict(case) | {
        "us": times,
        "speedup_of_fused": {n: round(us / fused_us, 3) for n, us in times.items() if not isinstance(us, str)},
        "relay_equation_10": round(case.relay_equation_10(), 3),
        "share_of_bandwidth": round(step.num_bytes / fused_us / 1e3 / ceilings.memory_gb_s, 3),
        "share_of_matrix_rate": round(step.num_flops / fused_us / 1e6 / ceilings.matrix_tflops, 3),
    }


def summary(cases: list[Mapping[str, Any]]) -> dict[str, float]:
    """Geometric means of what fused gains, and its worst case against plain paged attention."""
    names = sorted({name for case in cases for name in case["speedup_of_fused"]} - {"fused"})
    means = {}
    for name in names:
        logs = [math.log(case["speedup_of_fused"][name]) for case in cases if name in case["speedup_of_fused"]]
        means[f"geometric mean over {name}"] = round(math.exp(sum(logs) / len(logs)), 3)
    means["worst over paged"] = min(case["speedup_of_fused"]["paged"] for case in cases)
    return means


def check() -> int:
    """The gate alone, on small cases, on whatever device there is."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for num_prefill in (0, 2):
        case = Case(
            model="Qwen2-7B",
            prefix_len=40,
            own_len=9,
            num_members=2,
            num_decode=4,
            num_prefill=num_prefill,
            prefill_rows=5,
        )
        for name, found in gated(Step.make(case, device)):
            if isinstance(found, str):
                print(f"{name}: {found}")
                return 1
            print(f"{name} agrees with float64 on {case}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention.json")
    parser.add_argument("--check", action="store_true", help="compare only, small, on any machine")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.check:
        return check()
    run = require_gpu("benchmarks.attention")
    ceilings = measure_ceilings(run)
    cases = []
    for case in grid():
        cases.append(measure(case, run, ceilings))
        print(json.dumps(cases[-1]), flush=True)
    document = {
        "command": "python -m benchmarks.attention", "hardware": run.hardware, "versions": run.versions,
        "commit": run.commit,
        "ceilings": asdict(ceilings), "summary": summary(cases), "cases": cases,
    }  # fmt: skip
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
