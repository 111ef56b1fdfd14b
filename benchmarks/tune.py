"""Writes the tuned configuration of an architecture (engine/kernels/configs).

    python -m benchmarks.tune                     on a GPU: measures it, writes its architecture's file
    python -m benchmarks.tune --estimate sm_90    anywhere: from data sheets, for architectures not measured yet;
                                                  "default" is what fits every target, for devices without a file

Either way a launch ships only if it compiles for the architecture without spills and within its limits
(benchmarks/resources.py). Measured: every candidate runs steps of known tiles; the costs are the non-negative least
squares fit of slot time = sum over tiles of (a start, a rate per KV token from memory, one from L2, a partial result);
of the launches for pure decoding, and of those for mixed steps, the one that takes the least time over its steps ships.
A candidate is measured only on steps whose results it gets right.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Container, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.attention_batches import GroupSize, make_batch
from benchmarks.cross_compile import TARGETS, compile_attention
from benchmarks.data_sheet import DATA_SHEETS, estimate_costs, in_flight_bytes
from benchmarks.gpu import GpuRun, device_time, require_gpu
from benchmarks.least_squares import non_negative_least_squares
from benchmarks.resources import LIMITS, resources_of
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.device_work import WorkCapacity
from engine.kernels.fused import FusedAttention
from engine.kernels.paged import PagedAttention
from engine.kernels.reference import paged_attention_ref
from engine.kernels.relay import RelayAttention
from engine.kernels.triton_attention import architecture_of
from engine.kernels.tuned import CONFIG_FOLDER, Launch, TileShape
from engine.kernels.work_list import TileField, WorkList

HEAD_DIMS = (64, 128, 256)


def candidates(architecture: str, bits: int, head_dim: int) -> Iterator[Launch]:
    """Launches worth trying, the likeliest first; names are "decode" (narrow tiles only) and "mixed"."""
    is_small = architecture.startswith("gfx") or architecture == "default"
    # An LDS of 64 KiB holds one step's keys and values; deeper pipelines and longer steps are NVIDIA's.
    stages = (2, 1) if is_small else (3, 2, 4)
    # In fp32, for which products take no matrix units on NVIDIA, a wide tile has nothing to win.
    wides = ((0, 4), (0, 2)) if bits == 32 else ((0, 4), (0, 2), (128, 8), (128, 4), (64, 8), (64, 4))
    for wide_rows, num_warps in wides:
        for tokens in (32, 16) if is_small or bits == 32 else (64, 32, 128):
            # Keys and values of one step stay below 64 KiB.
            if 2 * tokens * head_dim * bits // 8 <= 64 * 1024:
                for num_stages in stages:
                    yield Launch(
                        name="mixed" if wide_rows else "decode", narrow=_shape(16, tokens),
                        wide=_shape(wide_rows, tokens) if wide_rows else None, num_warps=num_warps,
                        num_stages=num_stages, programs_per_processor=1, options={},
                    )  # fmt: skip


def _shape(rows: int, tokens: int) -> TileShape:
    return TileShape(rows=rows, tokens=tokens, tile_us=1, kilotoken_us=1, reread_kilotoken_us=1, partial_us=1)


def fitting(architecture: str, bits: int, head_dim: int, taken: Container[str] = ()) -> Iterator[Launch]:
    """The candidates that compile within the architecture's limits, with the programs that fit a processor.

    Args:
        taken: names of launches that are no longer wanted.
    """
    element = "bf16" if bits == 16 else "fp32"
    targets = tuple(TARGETS) if architecture == "default" else (architecture,)
    for launch in candidates(architecture, bits, head_dim):
        too_large = [t for t in targets if in_flight_bytes(launch, bits, head_dim) > LIMITS[t].program_shared_bytes]
        if launch.name in taken or too_large:
            continue
        num_programs = LIMITS[targets[0]].warps
        for target in targets:
            compiled = compile_attention(target, launch, element=element, head_dim=head_dim)
            resources = resources_of(launch.name, target, compiled)
            if resources.violations() or resources.sgpr_lanes:
                break
            num_programs = min(num_programs, resources.programs_per_processor)
        else:
            yield replace(launch, programs_per_processor=num_programs)


def estimate(architecture: str) -> dict[str, Any]:
    """A configuration from a data sheet: the first fitting candidates, each tile at its share of the device's rates."""
    sheet = DATA_SHEETS.get(architecture, DATA_SHEETS["sm_80"])
    entries = []
    for bits in (16, 32):
        for head_dim in HEAD_DIMS:
            launches: dict[str, Launch] = {}
            for launch in fitting(architecture, bits, head_dim, launches):
                if launch.name == "decode" and launch.programs_per_processor < 2:
                    continue  # nothing would run while a program starts
                launches[launch.name] = estimate_costs(launch, sheet, bits, head_dim)
                print(f"{architecture} {bits}-bit {head_dim}: {launches[launch.name]}", flush=True)
                if len(launches) == (2 if bits == 16 else 1):
                    break
            entries.append(_entry(bits, head_dim, launches.values()))
    return _document(
        architecture, f"estimated from the data sheet of {sheet.device}; not measured", sheet.num_processors, entries
    )


def measure(run: GpuRun) -> dict[str, Any]:
    """A configuration measured on the GPU at hand."""
    architecture = architecture_of(run.device)
    sheet = DATA_SHEETS.get(architecture)
    if sheet is None:
        raise SystemExit(f"benchmarks.tune: no compile target for {architecture}; known: {', '.join(DATA_SHEETS)}")
    entries = []
    for bits, dtype in ((16, torch.bfloat16), (32, torch.float32)):
        for head_dim in HEAD_DIMS:
            best: dict[str, tuple[float, Launch]] = {}
            for launch in fitting(architecture, bits, head_dim):
                fitted, total_us = measure_launch(estimate_costs(launch, sheet, bits, head_dim), run, dtype, head_dim)
                print(f"{architecture} {bits}-bit {head_dim} {total_us:10.1f} us  {fitted}", flush=True)
                if launch.name not in best or total_us < best[launch.name][0]:
                    best[launch.name] = total_us, fitted
            entries.append(_entry(bits, head_dim, [launch for _, launch in best.values()]))
    origin = f"measured on {run.hardware} with {run.versions}, commit {run.commit}"
    return _document(architecture, origin, run.num_processors, entries)


def measure_launch(launch: Launch, run: GpuRun, dtype: torch.dtype, head_dim: int) -> tuple[Launch, float]:
    """Runs a launch over steps of known tiles: the launch with fitted costs, and the sum of its times."""
    features, slot_times = [], []
    num_slots = run.num_processors * launch.programs_per_processor
    for backend_kind, groups in _steps(is_mixed=launch.wide is not None):
        backend = backend_kind(
            num_q_heads=32, num_kv_heads=8, head_dim=head_dim, dtype=dtype, block_size=16, device=run.device
        )
        batch, num_blocks = make_batch(groups, 16)
        work_list = backend.plan(batch, (launch,))
        time_us = _timed(backend, batch, work_list, num_blocks, run)
        counts = 8 * _features(work_list)
        features.append([num_slots, *counts])
        slot_times.append(time_us * num_slots)
    _, *costs = non_negative_least_squares(np.array(features), np.array(slot_times))
    shapes = [
        replace(shape, tile_us=a, kilotoken_us=b * 1000, reread_kilotoken_us=c * 1000, partial_us=d)
        for shape, (a, b, c, d) in zip(launch.shapes, np.array(costs).reshape(-1, 4).round(5).tolist(), strict=False)
    ]
    fitted = replace(launch, narrow=shapes[0], wide=shapes[1] if launch.wide else None)
    return fitted, sum(slot_times) / num_slots


def _steps(*, is_mixed: bool) -> Iterator[tuple[type[FusedAttention] | type[RelayAttention], list[GroupSize]]]:
    """Steps that tell the costs apart: starts, KV from memory, KV read again, partial results; and long chunks."""
    for num_requests in (32, 256):
        for own in (64, 512, 2048):
            yield PagedAttention, [GroupSize(prefix_len=0, members=[(own, 1)]) for _ in range(num_requests)]
        for prefix in (512, 4096):
            for members in (4, 32):
                groups = [GroupSize(prefix_len=prefix, members=[(128, 1)] * members)] * (num_requests // members)
                yield PagedAttention, groups
                yield RelayAttention, groups
    if is_mixed:
        for rows in (128, 512, 2048):
            yield PagedAttention, [GroupSize(prefix_len=0, members=[(rows, rows)]) for _ in range(7)]
            yield PagedAttention, [GroupSize(prefix_len=2048, members=[(rows, rows)] * 3)]


def _timed(
    backend: FusedAttention | RelayAttention, batch: AttentionBatch, work_list: WorkList, num_blocks: int, run: GpuRun
) -> float:
    """Median time of one layer, after its result was compared with the reference's."""
    shape = (num_blocks, 16, backend.num_kv_heads, backend.head_dim)
    generator = torch.Generator(device=run.device).manual_seed(0)
    options = {"dtype": backend.dtype, "device": run.device, "generator": generator}
    k_cache, v_cache = (torch.randn(shape, **options) for _ in range(2))
    query = torch.randn((batch.num_rows, backend.num_q_heads, backend.head_dim), **options)
    work = backend.reserve(WorkCapacity.of(work_list), work_list.launch)
    work.fill(work_list, batch.slot_mapping)
    scale = backend.head_dim**-0.5
    out = backend.attend(query, k_cache, v_cache, work, scale=scale)
    expected = paged_attention_ref(query.double(), k_cache.double(), v_cache.double(), batch, scale=scale)
    error = float((out.double() - expected).abs().max())
    if not error < run.tolerance(backend.dtype):
        raise SystemExit(
            f"benchmarks.tune: {backend.name} with {work_list.launch} is wrong by {error}; nothing is written"
        )
    return device_time(lambda: backend.attend(query, k_cache, v_cache, work, scale=scale)).us


def _features(work_list: WorkList) -> np.ndarray:
    """Of each shape: tiles, KV tokens read first, KV tokens read again, partial results; per KV head."""
    tiles = work_list.tiles[work_list.tiles[:, TileField.NUM_TOKENS] > 0]
    counts = np.zeros((len(work_list.launch.shapes), 4))
    seen: set[tuple[int, int]] = set()
    for tile in tiles:
        prefix_len, begin, end = (int(tile[f]) for f in (TileField.PREFIX_LEN, TileField.KV_BEGIN, TileField.KV_END))
        counted = counts[tile[TileField.IS_WIDE]]
        counted[0] += 1
        for entry, first, last in (
            (tile[TileField.PREFIX_ENTRY], begin, min(end, prefix_len)),
            (tile[TileField.OWN_ENTRY], max(begin - prefix_len, 0), end - prefix_len),
        ):
            if first < last:
                key = int(entry), first
                counted[2 if key in seen else 1] += last - first
                seen.add(key)
        counted[3] += tile[TileField.PART] >= 0
    return counts.reshape(-1)


def _entry(bits: int, head_dim: int, launches: Sequence[Launch] | Any) -> dict[str, Any]:
    return {"element_bits": bits, "head_dim": head_dim, "launches": [asdict(launch) for launch in launches]}


def _document(architecture: str, origin: str, num_processors: int, entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "architecture": architecture,
        "origin": origin,
        "num_processors": num_processors,
        "min_split_tokens": 256,
        "balance": 0.5,
        "share_margin": 0.1,
        "entries": entries,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--estimate", choices=[*TARGETS, "default"], help="from the data sheet instead of a measurement"
    )
    parser.add_argument("--folder", type=Path, default=CONFIG_FOLDER)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        document = estimate(arguments.estimate) if arguments.estimate else measure(require_gpu("benchmarks.tune"))
    path = arguments.folder / f"{document['architecture']}.json"
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
