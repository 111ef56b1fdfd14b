"""What Triton's interpreter finds; test_interpreted.py runs this file as a program, with TRITON_INTERPRET=1.

It runs every case (or those named) and prints a JSON line for each: what was found wrong, in words, and the largest
error. Besides what the cases poison, partial results and outputs are NaN before they are written, and outputs are
surrounded with guard values.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.attention_batches import make_batch
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.draw import draw_tokens as draw_tokens_ref
from engine.kernels.reference import paged_attention_ref
from engine.kernels.scoring import Scoring
from engine.kernels.triton.device_work import DeviceWork, WorkCapacity
from engine.kernels.triton.draw_kernel import BLOCK, draw_tokens
from engine.kernels.triton.triton_attention import TritonAttention
from engine.kernels.triton.work_list import RowField, TileField, WorkList
from tests.engine.kernels.random_rows import is_a_close_call, make_hard_rows, make_rows
from tests.engine.kernels.triton.cases import CASES, GUARD, MIXED, Case, Inputs, decode, make_backend, make_inputs
from tests.engine.kernels.triton.fp8 import RUNS as FP8_RUNS
from tests.engine.kernels.triton.layers import RUNS
from tests.engine.kernels.twins import write_kv_ref

TOLERANCES = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Largest error on standard normal inputs: a few units in the last place of results up to 4, of sums in fp32."""


def check(case: Case, backend: TritonAttention, batch: AttentionBatch, num_blocks: int) -> Iterator[str | float]:
    """Runs two layers in succession, then the first one in every other order: yields what is wrong in words, and each
    error as a number."""
    launches = [launch for launch in backend.tuned.launches if launch.name == case.launch]
    work_list = backend.plan(batch, launches)
    layers = [make_inputs(case, batch, num_blocks, seed) for seed in (1, 2)]
    sinks = torch.linspace(-1.0, 2.0, case.num_q_heads) if case.has_sinks else None
    settings = {"scale": case.head_dim**-0.5, "softcap": case.softcap, "window": case.window, "sinks": sinks}
    for inputs in layers:
        expected_caches = [cache.clone() for cache in (inputs.k_cache, inputs.v_cache)]
        work = backend.reserve(WorkCapacity.of(work_list), work_list.launch)
        work.fill(work_list, batch.slot_mapping)
        backend.write_kv(inputs.key, inputs.value, inputs.k_cache, inputs.v_cache, work)
        write_kv_ref(inputs.key, inputs.value, *expected_caches, torch.from_numpy(batch.slot_mapping))
        for cache, expected in zip((inputs.k_cache, inputs.v_cache), expected_caches, strict=True):
            if not torch.equal(cache.nan_to_num(GUARD), expected.nan_to_num(GUARD)):
                yield "write_kv wrote something else than the step's slots"
    first_results: list[torch.Tensor] = []
    for order in range(case.num_orders):
        work = backend.reserve(WorkCapacity.of(work_list), work_list.launch)
        work.fill(reordered(work_list, order), batch.slot_mapping)
        work.partial_out.fill_(torch.nan)
        work.partial_lse.fill_(torch.nan)
        for layer, inputs in enumerate(layers if order == 0 else layers[:1]):
            yield from check_layer(case, backend, work, inputs, batch, settings, first_results, order, layer)
    if case.num_orders > 1 and backend.name != "relay":
        yield from check_unfinished(case, backend, work_list, layers[0], batch, settings)


def check_layer(
    case: Case,
    backend: TritonAttention,
    work: DeviceWork,
    inputs: Inputs,
    batch: AttentionBatch,
    settings: dict[str, Any],
    first_results: list[torch.Tensor],
    order: int,
    layer: int,
) -> Iterator[str | float]:
    padded = torch.full((batch.num_rows + 2, case.num_q_heads + 2, case.head_dim + 8), GUARD, dtype=case.dtype)
    out = padded[1:-1, 1:-1, : case.head_dim]
    out.fill_(torch.nan)
    backend.attend(inputs.query, inputs.k_cache, inputs.v_cache, work, Scoring(**settings), out=out)
    result = out.clone()
    out.fill_(GUARD)
    if not (padded == GUARD).all():
        yield f"order {order}, layer {layer}: wrote outside of the output"
    if work.counters.any():
        yield f"order {order}, layer {layer}: counters are not 0 afterwards"
    if order == 0:
        first_results.append(result)
        k_cache, v_cache = (cache.double().nan_to_num(0.0) for cache in (inputs.k_cache, inputs.v_cache))
        expected = paged_attention_ref(inputs.query.double(), k_cache, v_cache, batch, Scoring(**settings))
        yield float((result.double() - expected).abs().max().nan_to_num(torch.inf))
    elif not torch.equal(result, first_results[layer]):
        yield f"order {order}, layer {layer}: the result depends on the order of programs"


def check_unfinished(
    case: Case,
    backend: TritonAttention,
    work_list: WorkList,
    inputs: Inputs,
    batch: AttentionBatch,
    settings: dict[str, Any],
) -> Iterator[str]:
    """Without one tile, the rows of that tile must stay unwritten, each counted one part short; all others are done.

    A merge that came too early would be put right by a later one when programs run one after the other, but not on a
    device: here it shows.
    """
    parts = np.flatnonzero(work_list.tiles[:, TileField.PART] >= 0)
    if len(parts) == 0:
        yield "a case with several orders has nothing to merge"
        return
    for left_out in {int(parts[0]), int(parts[-1])}:
        work = backend.reserve(WorkCapacity.of(work_list), work_list.launch)
        work.fill(replace(work_list, tiles=np.delete(work_list.tiles, left_out, axis=0)), batch.slot_mapping)
        out = torch.full(inputs.query.shape, torch.nan, dtype=case.dtype)
        backend.attend(inputs.query, inputs.k_cache, inputs.v_cache, work, Scoring(**settings), out=out)
        tile = work_list.tiles[left_out]
        first = tile[TileField.FIRST_ROW_ID]
        rows = work_list.row_ids[first : first + tile[TileField.NUM_TOKENS]]
        is_missing = torch.zeros(batch.num_rows, dtype=torch.bool)
        is_missing[rows] = True
        if not out[is_missing].isnan().all():
            yield f"without tile {left_out}: a row was written before its last part"
        if out[~is_missing].isnan().any():
            yield f"without tile {left_out}: a row that has all its parts was not written"
        expected = torch.from_numpy(np.where(is_missing, work_list.rows[:, RowField.NUM_PARTS] - 1, 0))
        if not (work.counters == expected[:, None]).all():
            yield f"without tile {left_out}: counts are wrong"


def reordered(work_list: WorkList, order: int) -> WorkList:
    """Order 0 is the work list's, 1 the reverse, the others random; tiles of relay's two launches stay apart."""

    def of(tiles: np.ndarray) -> np.ndarray:
        return tiles[::-1] if order == 1 else np.random.default_rng(order).permutation(tiles)

    if order == 0:
        return work_list
    middle = work_list.num_prefix_tiles
    first = work_list.tiles[:middle]
    is_apart = (first[:, TileField.KV_END] <= first[:, TileField.PREFIX_LEN]).all()
    parts = (work_list.tiles[:middle], work_list.tiles[middle:]) if is_apart else (work_list.tiles,)
    return replace(work_list, tiles=np.concatenate([of(part) for part in parts]))


def run_case(case: Case) -> tuple[list[str], float]:
    """What is wrong, in words, and the largest error."""
    batch, num_blocks = make_batch(case.groups, case.block_size)
    problems, errors = [], [0.0]
    for name in case.backends:
        for found in check(case, make_backend(case, name), batch, num_blocks):
            if isinstance(found, str):
                problems.append(f"{name}: {found}")
            else:
                errors.append(found)
                if not found < TOLERANCES[case.dtype]:
                    problems.append(f"{name}: largest error {found}, tolerance {TOLERANCES[case.dtype]}")
    return problems, max(errors)


def run_refill() -> tuple[list[str], float]:
    """A room reserved for a larger step serves two smaller ones in turn, and leaves the rows beyond them alone."""
    case = Case(name="", groups=[decode(40, (3, 9, 20, 33)), decode(0, (50,))])
    backend = make_backend(case, "fused")
    largest, _ = make_batch(case.groups, 16)
    work_list = backend.plan(largest)
    work = backend.reserve(WorkCapacity.of(work_list), work_list.launch)
    problems, worst = [], 0.0
    for groups in ([decode(40, (3, 9))], [decode(33, (1, 2, 3)), decode(0, (17,))]):
        batch, num_blocks = make_batch(groups, 16)
        inputs = make_inputs(case, batch, num_blocks, seed=3)
        work.fill(backend.plan(batch, (work.launch,)), batch.slot_mapping)
        if not (work.slots[batch.num_rows :] == -1).all():
            problems.append("rows beyond the step have slots")
        pad = largest.num_rows - batch.num_rows
        query, key, value = (
            torch.cat([rows, torch.full((pad, *rows.shape[1:]), torch.nan)])
            for rows in (inputs.query, inputs.key, inputs.value)
        )
        write_kv_ref(key, value, inputs.k_cache, inputs.v_cache, work.slots)
        out = torch.full(query.shape, GUARD)
        backend.attend(query, inputs.k_cache, inputs.v_cache, work, Scoring(scale=0.125), out=out)
        k_cache, v_cache = (cache.double().nan_to_num(0.0) for cache in (inputs.k_cache, inputs.v_cache))
        expected = paged_attention_ref(inputs.query.double(), k_cache, v_cache, batch, Scoring(scale=0.125))
        worst = max(worst, float((out[: batch.num_rows] - expected).abs().max().nan_to_num(torch.inf)))
        if not (out[batch.num_rows :] == GUARD).all() or work.counters.any():
            problems.append("rows beyond the step were written, or counters left behind")
    if not worst < TOLERANCES[torch.float32]:
        problems.append(f"largest error {worst}")
    try:
        too_large, _ = make_batch([decode(40, range(1, 20))], 16)
        work.fill(backend.plan(too_large, (work.launch,)), too_large.slot_mapping)
        problems.append("a step that does not fit was accepted")
    except ValueError:
        pass
    return problems, worst


def run_far_addresses() -> tuple[list[str], float]:
    """Blocks whose elements lie beyond 2**31: only the pages that are touched take memory."""
    case = Case(name="", groups=[decode(20, (5, 1))], dtype=torch.float16, num_q_heads=2, num_kv_heads=1)
    batch, num_blocks = make_batch(case.groups, 16)
    block_elements = 16 * case.head_dim
    first = 2**31 // block_elements
    storage = torch.empty((first + 2 * num_blocks) * block_elements, dtype=torch.float16)
    caches = [
        storage[skipped * block_elements :][: (first + num_blocks) * block_elements].view(-1, 16, 1, case.head_dim)
        for skipped in (0, num_blocks)
    ]
    inputs = make_inputs(case, batch, num_blocks, seed=4)
    for far, near in zip(caches, (inputs.k_cache, inputs.v_cache), strict=True):
        far[first:].copy_(near)
    moved = replace(
        batch, prefix_block_ids=batch.prefix_block_ids + np.int32(first),
        suffix_block_table=batch.suffix_block_table + np.int32(first),
        slot_mapping=batch.slot_mapping + first * 16,
    )  # fmt: skip
    backend = make_backend(case, "fused")
    work = backend.prepare(moved)
    backend.write_kv(inputs.key, inputs.value, *caches, work)
    out = backend.attend(inputs.query, *caches, work, Scoring(scale=0.125))
    near_work = backend.prepare(batch)
    backend.write_kv(inputs.key, inputs.value, inputs.k_cache, inputs.v_cache, near_work)
    expected = backend.attend(inputs.query, inputs.k_cache, inputs.v_cache, near_work, Scoring(scale=0.125))
    return ([] if torch.equal(out, expected) else ["differs from the same step at near addresses"]), 0.0


def run_refusals() -> tuple[list[str], float]:
    """What a launch does not cover is refused before it."""
    case = Case(name="", groups=MIXED)
    backend = make_backend(case, "fused")
    batch, num_blocks = make_batch(case.groups, 16)
    good = make_inputs(case, batch, num_blocks, seed=5)
    work = backend.prepare(batch)
    wrong = {
        "dtype": replace(good, query=good.query.half()),
        "heads": replace(good, query=good.query[:, :3]),
        "stride along head_dim": replace(good, query=good.query.transpose(1, 2).contiguous().transpose(1, 2)),
        "caches' strides": replace(good, v_cache=good.v_cache.contiguous()),
        "block size": replace(good, k_cache=good.k_cache[:, :8], v_cache=good.v_cache[:, :8]),
        "rows": replace(good, query=torch.cat([good.query, good.query])),
    }
    problems = []
    for name, inputs in wrong.items():
        try:
            backend.attend(inputs.query, inputs.k_cache, inputs.v_cache, work, Scoring(scale=1.0))
            problems.append(f"accepted a wrong {name}")
        except ValueError:
            pass
    for shape in ({"num_q_heads": 34}, {"num_q_heads": 3}, {"head_dim": 260}, {"head_dim": 20}, {"block_size": 20}):
        try:
            make_backend(replace(case, **shape), "fused")
            problems.append(f"accepted {shape}")
        except ValueError:
            pass
    return problems, 0.0


def run_draws() -> tuple[list[str], float]:
    """Random draws, against those that sort; more tokens than a program holds at once, and fewer."""
    problems = []
    for logits, settings in (
        make_rows(1, 12, 31, has_ties=True),
        make_rows(1, 12, BLOCK, has_ties=True),
        make_rows(1, 12, BLOCK + 1, has_ties=False),
        make_hard_rows(1, 2 * BLOCK + 809, BLOCK),
    ):
        vocab_size = logits.shape[1]
        expected, found = draw_tokens_ref(logits, settings), draw_tokens(logits, settings)
        problems += [
            f"of {vocab_size} tokens row {row} drew {found[row]}, expected {expected[row]}: {settings[row].tolist()}"
            for row in (expected != found).nonzero().flatten().tolist()
            if not is_a_close_call(logits[row], settings[row], int(found[row]))
        ]
        alone = torch.cat([draw_tokens(logits[row:][:1], settings[row:][:1]) for row in range(0, len(logits), 7)])
        if not torch.equal(alone, found[::7]):
            problems.append(f"of {vocab_size} tokens other ones are drawn alone than in a batch")
    return problems, 0.0


SPECIAL = (
    {
        "refill": run_refill,
        "far addresses": run_far_addresses,
        "refusals": run_refusals,
        "draws": run_draws,
    }
    | RUNS
    | FP8_RUNS
)


def main() -> None:
    torch.set_num_threads(1)
    runs = {case.name: (lambda case=case: run_case(case)) for case in CASES} | SPECIAL
    for name in sys.argv[1:] or runs:
        start = time.perf_counter()
        problems, error = runs[name]()
        seconds = time.perf_counter() - start
        print(
            json.dumps({"case": name, "problems": problems, "max_error": error, "seconds": round(seconds, 2)}),
            flush=True,
        )


if __name__ == "__main__":
    main()
