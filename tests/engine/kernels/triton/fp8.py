"""Products and KV in 8-bit floating point against torch: every kernel that quantises, and whole layers.

program.py runs them.
"""

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import triton

from benchmarks.kernels.attention_batches import GroupSize, make_batch
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.decoder_layer import LayerWeights, TabledWork
from engine.kernels.reference import paged_attention_ref
from engine.kernels.scoring import Scoring
from engine.kernels.triton.layers.fp8 import (
    FP8_DTYPES,
    ScaledRows,
    quantize_rows,
    quantize_weights,
    quantized_swiglu,
    scaled_linear,
)
from engine.kernels.triton.layers.layer_kernels import add_rms_norm, rotate_and_write_kv
from tests.engine.kernels.triton.cases import BACKENDS, MIXED, decode
from tests.engine.kernels.triton.layers import (
    EPSILON,
    Findings,
    LaunchCounter,
    draw_layer,
    end_with_norm,
    launch_problems,
)
from tests.engine.kernels.twins import add_rms_norm_ref, rotate_and_write_kv_ref, swiglu_ref

INTERPRETED_DTYPES = FP8_DTYPES if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else FP8_DTYPES[:1]
"""The interpreter of older versions knows no fnuz formats, although their compilers do."""

PROMPTS = (GroupSize(prefix_len=20, members=[(45, 45), (17, 11)]), decode(0, (5,)), decode(0, (3,)))
"""Steps of many rows, whose KV is copied; those of one row are packed."""

FP8_RELATIVE = 2.0**-4
"""Largest rounding error of a number of 3 mantissa bits."""


def quantized_ref(dtype: torch.dtype, x: torch.Tensor, scale_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers that fp8 rows of float64 ``[..., n]`` stand for, with one scale a row."""
    scales = (x.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / torch.finfo(dtype).max).to(scale_dtype).double()
    return (x / scales).float().to(dtype).double() * scales


def numbers(rows: ScaledRows) -> torch.Tensor:
    return rows.values.double() * rows.scales.double()


def close(findings: Findings, what: str, found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """Each number is the nearest in fp8, but for those that fp32 puts on another side of a tie: few, and next to it."""
    expected = quantized_ref(dtype, exact)
    largest = exact.abs().amax(dim=-1, keepdim=True)
    step = torch.maximum(exact.abs() * 2 * FP8_RELATIVE, largest * torch.finfo(dtype).smallest_normal)
    differs = (found - expected).abs() > 1e-5 * largest
    if differs.double().mean() > 0.01 or ((found - expected).abs() > step * 1.01).any():
        findings.problems.append(f"{what}: {int(differs.sum())} of {differs.numel()} numbers are not the nearest ones")


def new_rows(num_rows: int, size: int, dtype: torch.dtype) -> ScaledRows:
    """Poisoned."""
    rows = ScaledRows.empty(num_rows, size, dtype, torch.device("cpu"))
    rows.scales.fill_(torch.nan)
    rows.values.view(torch.uint8).fill_(0x7F if dtype == torch.float8_e4m3fn else 0x80)
    return rows


def run_quantized_rows() -> tuple[list[str], float]:
    """The norm, SwiGLU and attention's result, in all magnitudes that a row can have."""
    findings = Findings()
    for dtype, size in itertools.product(INTERPRETED_DTYPES, (16, 240, 1024, 2100)):
        generator = torch.Generator().manual_seed(size)
        x = torch.randn(6, 2 * size, generator=generator)
        x *= torch.tensor([1e-6, 1.0, 1e4, 1.0, 0.0, 1.0])[:, None]
        x[3] *= torch.exp(3 * torch.randn(2 * size, generator=generator))  # numbers below the smallest normal one
        weight = torch.randn(size, generator=generator)
        residual, where = x[:, :size], f"{dtype}, size {size}"
        out = new_rows(6, size, dtype)
        add_rms_norm(residual, weight, EPSILON, normed=out)
        exact = add_rms_norm_ref(residual.double(), weight.double(), EPSILON)[1]
        close(findings, f"{where}: norm", numbers(out), exact, dtype)
        out = new_rows(6, size, dtype)
        quantized_swiglu(x, out)
        close(findings, f"{where}: swiglu", numbers(out), swiglu_ref(x.double()), dtype)
        parts = torch.tensor([[0, 1, 7], [0, 2, 7], [0, 0, 7], [0, 1, 7], [0, 1, 7], [0, 1, 7]], dtype=torch.int32)
        poisoned = residual.clone()
        poisoned[2] = torch.nan  # the row that no tile has written
        for rows in (None, torch.tensor([5, 2, 0, 5])):
            picked = torch.arange(6) if rows is None else rows
            out = new_rows(len(picked), size, dtype)
            quantize_rows(poisoned, out, parts[:, 1], rows)
            exact = torch.where(parts[:, 1:2] > 0, residual.double(), 0.0)[picked]
            close(findings, f"{where}: rows {rows}", numbers(out), exact, dtype)
    return findings.result


def run_scaled_products() -> tuple[list[str], float]:
    """torch's product of scaled rows is that of the numbers which they stand for."""
    findings = Findings()
    for dtype, num_rows, has_bias in itertools.product(FP8_DTYPES, (1, 5), (False, True)):
        generator = torch.Generator().manual_seed(num_rows)
        x, matrix = torch.randn(num_rows, 64, generator=generator), torch.randn(48, 64, generator=generator)
        matrix[3] *= 1e-3
        rows, weights = quantize_weights(x, dtype), quantize_weights(matrix, dtype)
        bias = torch.randn(48, generator=generator) if has_bias else None
        found = scaled_linear(rows, weights, bias, torch.float32)
        expected = numbers(rows) @ numbers(weights).t() + (0 if bias is None else bias.double())
        findings.compare(f"{dtype}, {num_rows} rows, bias {has_bias}", found, expected, torch.float32, num_roundings=4)
        close(findings, f"{dtype}: weights", numbers(weights), matrix.double(), dtype)
    return findings.result


def kv_of(cache: torch.Tensor, head_dim: int) -> torch.Tensor:
    """A KV cache in fp8 as numbers: ``[num_blocks, block_size, num_kv_heads, head_dim]``."""
    num_blocks, block_size, num_kv_heads, _ = cache.shape
    blocks = cache.view(torch.uint8).flatten(1)
    num_values = block_size * num_kv_heads * head_dim
    values = blocks[:, :num_values].contiguous().view(cache.dtype).double()
    scales = blocks[:, num_values:].contiguous().view(torch.bfloat16).double()
    values = values.view(num_blocks, block_size, num_kv_heads, head_dim)
    return values * scales.view(num_blocks, num_kv_heads, block_size).transpose(1, 2).unsqueeze(-1)


def new_cache(num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Every number in it is NaN."""
    shape = (num_blocks, block_size, num_kv_heads, head_dim + 2)
    return torch.full(shape, 0xFF if dtype == torch.float8_e4m3fn else 0x80, dtype=torch.uint8).view(dtype)


def run_kv() -> tuple[list[str], float]:
    """Keys and values as they are written, and attention to what was written."""
    findings = Findings()
    short = [decode(0, (own_len,)) for own_len in (1, 16, 17, 3) * 4]  # which are packed
    mixed = (decode(20, (5, 17)), GroupSize(prefix_len=0, members=[(6, 6)]), *short)
    shapes: Sequence[tuple[str, int, int, int, int, torch.dtype, dict[str, float]]] = (
        ("fused", 4, 2, 64, 16, torch.float32, {}),
        ("paged", 7, 1, 96, 32, torch.float32, {"window": 9}),
        ("relay", 6, 3, 128, 16, torch.bfloat16, {"softcap": 20.0}),
    )
    for (number, shape), sizes in itertools.product(enumerate(shapes), (mixed, PROMPTS)):
        name, num_q_heads, num_kv_heads, head_dim, block_size, dtype, settings = shape
        fp8 = INTERPRETED_DTYPES[number % len(INTERPRETED_DTYPES)]
        where = f"{name}, {num_q_heads} over {num_kv_heads} heads of {head_dim}, {fp8}"
        batch, num_blocks = make_batch(sizes, block_size)
        backend = BACKENDS[name](
            num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, fp8=fp8,
            block_size=block_size, device=torch.device("cpu"),
        )  # fmt: skip
        caches = [new_cache(num_blocks, block_size, num_kv_heads, head_dim, fp8) for _ in range(2)]
        generator = torch.Generator().manual_seed(head_dim)
        num_columns = (num_q_heads + 2 * num_kv_heads) * head_dim
        # What the step attends to is written first: every slot but the last of a block that is not full.
        slots = written_slots(batch)
        qkv = torch.randn(len(slots), num_columns, generator=generator).to(dtype)
        qkv[1] *= 1e-3
        qkv[2] *= 1e3
        angles = torch.randn(len(slots), head_dim // 2, generator=generator).repeat(1, 2)
        query = rotate_and_write_kv(qkv, angles.cos(), angles.sin(), *caches, slots, num_q_heads=num_q_heads)
        exact = [torch.zeros(num_blocks, block_size, num_kv_heads, head_dim, dtype=torch.float64) for _ in range(2)]
        rotate_and_write_kv_ref(
            qkv.double(), angles.cos().double(), angles.sin().double(), *exact, slots, num_q_heads=num_q_heads
        )
        held = [kv_of(cache, head_dim) for cache in caches]
        is_written = torch.zeros(num_blocks * block_size, dtype=torch.bool)
        is_written[slots] = True
        for kept, wanted in zip(held, exact, strict=True):
            rows = kept.view(-1, num_kv_heads, head_dim)
            if not rows[~is_written].isnan().all():
                findings.problems.append(f"{where}: wrote other slots than its own")
            found, wanted = rows[is_written], wanted.view(-1, num_kv_heads, head_dim)[is_written]
            largest = wanted.abs().amax(dim=-1, keepdim=True)
            if ((found - wanted).abs() > wanted.abs() * FP8_RELATIVE * 1.02 + largest * 1e-4).any():
                findings.problems.append(f"{where}: KV is farther off than fp8 is")
        work = backend.prepare(batch)
        if (work.copy_kv is None) != (sizes is mixed):
            findings.problems.append(f"{where}: KV must be copied for steps of prompts only")
        num_used = len(batch.prefix_block_ids) + len(batch.suffix_block_table)
        if work.copy_kv is not None and len(work.copy_kv(*caches)[0]) != num_used:
            findings.problems.append(f"{where}: each block must be copied once")
        queries, scoring = query[: batch.num_rows], Scoring(scale=head_dim**-0.5, **settings)
        out = backend.attend(queries, *caches, work, scoring)
        numbers_held = (kept.nan_to_num(0.0) for kept in held)
        expected = paged_attention_ref(queries.double(), *numbers_held, batch, scoring)
        largest = float(expected.abs().max())
        findings.compare(where, out / largest, expected / largest, dtype, num_roundings=4)
    return findings.result


def run_common_kv() -> tuple[list[str], float]:
    """Copied KV of two groups whose prefixes begin with the same blocks: each is copied once, for both."""
    findings, num_q_heads, head_dim, fp8 = Findings(), 5, 80, INTERPRETED_DTYPES[-1]
    groups = [GroupSize(prefix_len=length, members=[(30, 30), (20, 20)]) for length in (70, 85)]
    batch, num_blocks = make_batch(groups, 16)
    second = int(batch.prefix_block_starts[1])
    batch.prefix_block_ids[second : second + 2] = batch.prefix_block_ids[:2]
    backend = BACKENDS["fused"](
        num_q_heads=num_q_heads, num_kv_heads=1, head_dim=head_dim, dtype=torch.float32, fp8=fp8, block_size=16,
        device=torch.device("cpu"),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    caches = [packed(torch.randn(num_blocks, 16, 1, head_dim, generator=generator), fp8) for _ in range(2)]
    query = torch.randn(batch.num_rows, num_q_heads, head_dim, generator=generator)
    work, scoring = backend.prepare(batch), Scoring(scale=head_dim**-0.5)
    num_used = len(np.union1d(batch.prefix_block_ids, batch.suffix_block_table))
    if work.copy_kv is None or len(work.copy_kv(*caches)[0]) != num_used:
        findings.problems.append("each block must be copied once")
    out = backend.attend(query, *caches, work, scoring)
    expected = paged_attention_ref(query.double(), *(kv_of(cache, head_dim) for cache in caches), batch, scoring)
    findings.compare("common blocks", out, expected, torch.float32, num_roundings=4)
    return findings.result


def written_slots(batch: AttentionBatch) -> torch.Tensor:
    """The slots of all tokens that rows of the step attend to, their own included."""
    size, slots = batch.block_size, set()
    for group in range(batch.num_groups):
        blocks = batch.prefix_block_ids[batch.prefix_block_starts[group] :]
        slots |= {int(blocks[i // size]) * size + i % size for i in range(batch.prefix_lens[group])}
    for sequence in range(len(batch.suffix_lens)):
        blocks = batch.suffix_block_table[batch.suffix_block_starts[sequence] :]
        slots |= {int(blocks[i // size]) * size + i % size for i in range(batch.suffix_lens[sequence])}
    return torch.tensor(sorted(slots))


def layer_ref(
    layer: LayerWeights,
    hidden: torch.Tensor,
    angles: torch.Tensor,
    caches: torch.Tensor,
    batch: AttentionBatch,
    num_q_heads: int,
    rounded: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """A layer in float64 whose products read what `rounded` makes of rows, weights and KV; writes to the caches."""

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(rounded(x), rounded(weight.double()), None if bias is None else bias.double())

    _, normed = add_rms_norm_ref(hidden, layer.attention_norm.double(), layer.epsilon)
    slots = torch.from_numpy(batch.slot_mapping)
    fresh = torch.zeros_like(caches)
    query = rotate_and_write_kv_ref(
        product(normed, *layer.qkv), angles.cos(), angles.sin(), *fresh, slots, num_q_heads=num_q_heads,
        q_norm=None if layer.q_norm is None else layer.q_norm.double(),
        k_norm=None if layer.k_norm is None else layer.k_norm.double(), epsilon=layer.epsilon,
    )  # fmt: skip
    places = (slots // batch.block_size, slots % batch.block_size)
    for cache, written in zip(caches, fresh, strict=True):
        cache[places] = rounded(written[places], torch.bfloat16)
    attended = paged_attention_ref(query, *caches, batch, layer.scoring).flatten(1)
    hidden = hidden + product(attended, *layer.output)
    _, normed = add_rms_norm_ref(hidden, layer.mlp_norm.double(), layer.epsilon)
    gate_up = torch.cat([product(normed, layer.gate), product(normed, layer.up)], dim=-1)
    return hidden + product(swiglu_ref(gate_up), layer.down)


def run_fp8_layers() -> tuple[list[str], float]:
    """Three layers against float64 with the same roundings, and how many launches they take."""
    findings = Findings()
    num_q_heads, num_kv_heads, head_dim = 6, 2, 32
    for sizes, num_launches, has_extras, output_rows, fp8 in (
        (MIXED[:2], 10, False, None, INTERPRETED_DTYPES[0]),
        (PROMPTS, 11, True, torch.tensor([40, 3, 0, 3]), INTERPRETED_DTYPES[-1]),
    ):
        batch, num_blocks = make_batch(sizes, 16)
        generator = torch.Generator().manual_seed(7)
        angles = torch.randn(batch.num_rows, head_dim // 2, generator=generator).repeat(1, 2)
        hidden = torch.randn(batch.num_rows, 96, generator=generator)
        kv = torch.randn(3, 2, num_blocks, 16, num_kv_heads, head_dim, generator=generator)
        layers = end_with_norm([draw_layer(num_q_heads, num_kv_heads, head_dim, has_extras, seed) for seed in range(3)])
        backend = BACKENDS["fused"](
            num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=16, dtype=torch.float32,
            device=torch.device("cpu"), fp8=fp8,
        )  # fmt: skip
        computed = backend.make_layers(iter(layers))
        assert computed is not None
        held = [[packed(cache, fp8) for cache in kv[:, i]] for i in range(2)]
        work = TabledWork([backend.prepare(batch)], [0] * len(layers))
        given, rotation = hidden.clone(), (angles.cos(), angles.sin())
        with torch.inference_mode(), LaunchCounter() as counter:
            out = computed(given, held, work, rotation, output_rows)
        # Attention's result is quantised, and its rows selected, by a launch of its own; another one copies KV.
        findings.problems += launch_problems(counter.launched, [num_launches] * 3)
        rows = slice(None) if output_rows is None else output_rows
        found = []
        for rounded in (partial(quantized_ref, fp8), lambda x, *_: x):
            expected, expected_kv = hidden.double(), rounded(kv.double(), torch.bfloat16)
            for layer, caches in zip(layers, expected_kv, strict=True):
                expected = layer_ref(layer, expected, angles.double(), caches, batch, num_q_heads, rounded)
            _, expected = add_rms_norm_ref(expected[rows], layers[-1].final_norm.double(), layers[-1].epsilon)
            errors = (out.double() - expected).abs()
            found.append(float(errors.square().mean().sqrt() / expected.square().mean().sqrt()))
        # A number that float32 puts on the other side of a tie is off by a whole step of fp8; most are not.
        if not found[0] < found[1] / 3 or not found[1] < 0.02:
            findings.problems.append(
                f"extras {has_extras}: off by {found[0]} with the same roundings, {found[1]} without"
            )
    return findings.result


def packed(cache: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """Numbers ``[num_blocks, block_size, num_kv_heads, head_dim]`` as a KV cache in fp8."""
    scales = (cache.abs().amax(dim=-1) / torch.finfo(fp8).max).bfloat16()
    values = (cache / scales.float().unsqueeze(-1)).to(fp8)
    parts = (values.flatten(1).view(torch.uint8), scales.transpose(1, 2).flatten(1).view(torch.uint8))
    return torch.cat(parts, dim=1).view(*cache.shape[:3], -1).view(fp8)


RUNS = {
    "fp8 rows": run_quantized_rows,
    "fp8 products": run_scaled_products,
    "fp8 KV": run_kv,
    "fp8 KV of groups": run_common_kv,
    "fp8 layers": run_fp8_layers,
}
