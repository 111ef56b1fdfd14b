"""The CPU backends against plain softmax attention in float64, on ragged batches of every shape they treat apart."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.kernels.cpu.native import NativeBackend
from engine.kernels.cpu.native_build import NativeBuildError, load_library
from engine.kernels.cpu.torch_attention import CpuAttention
from engine.kernels.scoring import Scoring
from engine.kernels.torch_output_layer import mask_logits
from tests.engine.kernels.compiled_units import PLAIN, VECTORS, compiled
from tests.engine.kernels.cpu.native_calls import rms_norm, rotate_and_write_kv
from tests.engine.kernels.ragged_batches import BATCHES, BLOCK_SIZE, CPU_FLAGS, NATIVE_BATCHES, NO_RULE, Layout

NUM_BLOCKS = 300
NATIVE_BLOCK_SIZE = 64
NUM_NATIVE_BLOCKS = 100


def rules(num_q_heads: int) -> dict[str, dict[str, Any]]:
    """What a layer may ask of attention besides scaling, alone and together."""
    sinks = torch.linspace(-1.5, 2.5, num_q_heads)
    return {
        "a window": {"window": 7},
        "a window beyond some prompts": {"window": 45},
        "a soft cap": {"softcap": 1.5},
        "sinks": {"sinks": sinks},
        "all": {"window": 33, "softcap": 0.7, "sinks": sinks},
    }


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (7, 1)], ids=lambda heads: f"{heads[0]}q{heads[1]}kv")
@pytest.mark.parametrize("is_scattered", [False, True], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("name", BATCHES)
def test_every_row_attends_to_its_prefix_and_its_own_past(
    name: str, is_scattered: bool, heads: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(len(name))
    num_q_heads, num_kv_heads = heads
    block_ids = torch.randperm(NUM_BLOCKS, generator=generator).tolist() if is_scattered else list(range(NUM_BLOCKS))
    layout = Layout(BATCHES[name], block_ids)
    cache_shape = (NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, 16)
    keys, values = (torch.randn(cache_shape, generator=generator) for _ in range(2))
    # A strided query, as the model's projection gives it.
    query = torch.randn(num_q_heads, layout.batch.num_rows, 16, generator=generator).transpose(0, 1)
    backend = CpuAttention(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=16, dtype=torch.float32)
    out = backend.attend(query, keys, values, backend.prepare(layout.batch), Scoring(scale=0.3))
    assert out.shape == query.shape
    assert (out - layout.expected(query, keys, values, 0.3)).abs().max() < 5e-6


@pytest.mark.parametrize("rule", rules(1))
@pytest.mark.parametrize("name", ["prefix at block ends", "long chunk below a prefix", "everything"])
def test_windows_caps_and_sinks_are_computed(name: str, rule: str) -> None:
    generator = torch.Generator().manual_seed(len(rule))
    layout = Layout(BATCHES[name], torch.randperm(NUM_BLOCKS, generator=generator).tolist())
    keys, values = (torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, 16, generator=generator) for _ in range(2))
    query = torch.randn(6, layout.batch.num_rows, 16, generator=generator).transpose(0, 1)
    backend = CpuAttention(num_q_heads=6, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    asked = rules(6)[rule]
    out = backend.attend(query, keys, values, backend.prepare(layout.batch), Scoring(scale=0.3, **asked))
    assert (out - layout.expected(query, keys, values, 0.3, asked)).abs().max() < 5e-6


def test_bfloat16_stays_within_its_rounding() -> None:
    generator = torch.Generator().manual_seed(0)
    layout = Layout(BATCHES["everything"], list(range(NUM_BLOCKS)))
    keys, values = (torch.randn(NUM_BLOCKS, BLOCK_SIZE, 2, 64, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(layout.batch.num_rows, 6, 64, generator=generator).bfloat16()
    backend = CpuAttention(num_q_heads=6, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    out = backend.attend(query, keys, values, backend.prepare(layout.batch), Scoring(scale=0.125))
    assert (out.double() - layout.expected(query, keys, values, 0.125)).abs().max() < 2e-2


def test_unused_blocks_are_never_read_into_an_answer() -> None:
    """Blocks of nobody, and slots beyond a sequence's end, hold values that would swamp any answer."""
    layout = Layout(BATCHES["everything"], list(range(NUM_BLOCKS)))
    used = layout.used_slots()
    generator = torch.Generator().manual_seed(3)
    keys, values = (torch.full((NUM_BLOCKS, BLOCK_SIZE, 2, 16), 1e6) for _ in range(2))
    for cache in (keys, values):
        cache.flatten(0, 1)[used] = torch.randn(len(used), 2, 16, generator=generator)
    query = torch.randn(layout.batch.num_rows, 4, 16, generator=generator)
    backend = CpuAttention(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    out = backend.attend(query, keys, values, backend.prepare(layout.batch), Scoring(scale=0.25))
    assert (out - layout.expected(query, keys, values, 0.25)).abs().max() < 5e-6


def test_written_rows_land_in_their_slots() -> None:
    layout = Layout([(0, [(3, 3)])], [0])
    keys, values = (torch.zeros(4, BLOCK_SIZE, 2, 16) for _ in range(2))
    new_keys, new_values = torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    backend = CpuAttention(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
    backend.write_kv(new_keys, new_values, keys, values, backend.prepare(layout.batch))
    assert torch.equal(keys.flatten(0, 1)[:3], new_keys)
    assert torch.equal(values.flatten(0, 1)[:3], new_values)
    assert keys.flatten(0, 1)[3:].abs().max() == 0


UNITS = {"best": ""}
"""Compiler flags that leave out what this CPU has, so that what serves lesser ones is tested here as well."""
if "amx_bf16" in CPU_FLAGS:
    UNITS["vectors"] = VECTORS
if "avx512_bf16" in CPU_FLAGS:
    UNITS["plain"] = PLAIN


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    """Where the kernels lie, compiled for each of `UNITS`."""
    return {units: compiled(flags, "native") for units, flags in UNITS.items()}


@pytest.mark.parametrize(
    ("heads", "head_dim"), [((1, 1), 64), ((9, 3), 64), ((7, 1), 96), ((16, 1), 128), ((4, 4), 256), ((6, 2), 16)]
)
@pytest.mark.parametrize(
    ("dtype", "most_error", "units"),
    [(torch.float32, 6e-6, "best"), *((torch.bfloat16, 2e-2, units) for units in UNITS)],
)
@pytest.mark.parametrize("name", NATIVE_BATCHES)
def test_native_rows_attend_to_their_prefix_and_their_own_past(
    name: str,
    dtype: torch.dtype,
    most_error: float,
    units: str,
    heads: tuple[int, int],
    head_dim: int,
    folders: dict[str, Path],
) -> None:
    """Blocks are scattered; those of nobody, and slots beyond an end, hold values that would swamp any answer."""
    check_native(name, dtype, most_error, heads, head_dim, folders[units], NO_RULE)


@pytest.mark.parametrize("rule", rules(1))
@pytest.mark.parametrize(
    ("dtype", "most_error", "units"),
    [(torch.float32, 6e-6, "best"), *((torch.bfloat16, 2e-2, units) for units in UNITS)],
)
@pytest.mark.parametrize("name", ["at sub-block ends", "beyond a chunk of scores", "everything"])
def test_native_windows_caps_and_sinks_are_computed(
    name: str, dtype: torch.dtype, most_error: float, units: str, rule: str, folders: dict[str, Path]
) -> None:
    check_native(name, dtype, most_error, (6, 2), 64, folders[units], rules(6)[rule])


@pytest.mark.parametrize(
    ("dtype", "most_error", "units"),
    [(torch.float32, 3e-4, "best"), *((torch.bfloat16, 5e-2, units) for units in UNITS)],
)
@pytest.mark.parametrize("name", ["at sub-block ends", "beyond a chunk of scores", "everything"])
def test_scores_that_grow_along_a_prompt(
    name: str, dtype: torch.dtype, most_error: float, units: str, folders: dict[str, Path]
) -> None:
    """The running maximum is raised again and again, and what was computed with lower ones is rescaled."""
    check_native(name, dtype, most_error, (6, 2), 64, folders[units], NO_RULE, growth=60)


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_no_number_spoils_only_the_rows_that_see_it(
    dtype: torch.dtype, units: str, folders: dict[str, Path]
) -> None:
    layout = Layout([(0, [(100, 100)])], list(range(4)), NATIVE_BLOCK_SIZE)
    kernels = NativeBackend(
        num_q_heads=2, num_kv_heads=1, head_dim=64, dtype=dtype, block_size=NATIVE_BLOCK_SIZE, folder=folders[units]
    )
    generator = torch.Generator().manual_seed(1)
    keys, values = (torch.randn(100, 1, 64, generator=generator).to(dtype) for _ in range(2))
    query = 40 * torch.randn(100, 2, 64, generator=generator).to(dtype)

    def attend() -> torch.Tensor:
        k_cache, v_cache = (torch.zeros(4, NATIVE_BLOCK_SIZE, 1, 64, dtype=dtype) for _ in range(2))
        work = kernels.prepare(replace(layout.batch, slot_mapping=np.array(layout.used_slots())))
        kernels.write_kv(keys, values, k_cache, v_cache, work)
        return kernels.attend(query, k_cache, v_cache, work, Scoring(scale=1.0))

    expected = attend()
    keys[50:70:3] = torch.nan
    found = attend()
    assert torch.equal(found[:50], expected[:50])
    assert found[70:].isnan().all()


def check_native(
    name: str,
    dtype: torch.dtype,
    most_error: float,
    heads: tuple[int, int],
    head_dim: int,
    folder: Path,
    rule: dict[str, Any],
    growth: float = 0,
) -> None:
    """growth: how many times as long the last keys are as random ones; the first are a tenth."""
    generator = torch.Generator().manual_seed(len(name))
    num_q_heads, num_kv_heads = heads
    block_ids = torch.randperm(NUM_NATIVE_BLOCKS, generator=generator).tolist()
    layout = Layout(NATIVE_BATCHES[name], block_ids, NATIVE_BLOCK_SIZE)
    kernels = NativeBackend(
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        block_size=NATIVE_BLOCK_SIZE,
        folder=folder,
    )
    work = kernels.prepare(layout.batch)
    shape = (NUM_NATIVE_BLOCKS, NATIVE_BLOCK_SIZE, num_kv_heads, head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    used = layout.used_slots()
    if growth:
        keys.flatten(0, 1)[used] *= torch.linspace(0.1, growth, len(used))[:, None, None]
    keys, values = keys.to(dtype), values.to(dtype)
    k_cache, v_cache = (torch.full(shape, 1e4, dtype=dtype) for _ in range(2))
    new_keys, new_values = (kv.flatten(0, 1)[used] for kv in (keys, values))
    kernels.write_kv(
        new_keys, new_values, k_cache, v_cache, kernels.prepare(replace(layout.batch, slot_mapping=np.array(used)))
    )
    # A strided query, as the fused projection gives it.
    qkv = torch.randn(layout.batch.num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(dtype)
    query = qkv.view(layout.batch.num_rows, -1, head_dim)[:, :num_q_heads]
    out = kernels.attend(query, k_cache, v_cache, work, Scoring(scale=0.2, **rule))
    assert out.shape == query.shape
    assert (out.double() - layout.expected(query, keys, values, 0.2, rule)).abs().max() < most_error


@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("num_rows", [1, 5, 12, 13, 31, 32, 33, 300, 437])
def test_native_products_and_what_is_between_them(num_rows: int, units: str, folders: dict[str, Path]) -> None:
    """Against float64, in both formats."""
    generator = torch.Generator().manual_seed(num_rows)
    for dtype, most_error in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        kernels = NativeBackend(
            num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, block_size=32, folder=folders[units]
        )
        x, gate, up, weight, residual = (
            torch.randn(shape, generator=generator).to(dtype) / shape[1] ** 0.5
            for shape in ((num_rows, 96), (160, 96), (160, 96), (64, 96), (num_rows, 64))
        )
        norm, bias = (torch.randn(size, generator=generator).to(dtype) for size in (96, 64))
        normed = rms_norm(kernels, x, norm, 1e-5)
        wide = x.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.double()
        assert (normed.double() - expected).abs().max() < most_error * expected.abs().max()
        gates, ups = normed.double() @ gate.double().T, normed.double() @ up.double().T
        expected = torch.nn.functional.silu(gates) * ups
        packed, packed_gated = kernels.pack(weight, bias), kernels.pack_gated(gate, up)
        assert packed is not None
        assert packed_gated is not None
        gated = kernels.project(normed, packed_gated)
        assert (gated.double() - expected).abs().max() < most_error * expected.abs().max()
        expected = normed.double() @ weight.double().T + bias.double() + residual.double()
        out = kernels.project(normed, packed, residual)
        assert (out.double() - expected).abs().max() < most_error * expected.abs().max()
        assert torch.equal(packed.columns(torch.tensor([63, 0, 17, 17])), weight[[63, 0, 17, 17]])


@pytest.mark.parametrize(
    ("dtype", "most_error"), [(torch.bfloat16, 0.01), (torch.float32, 1e-6)], ids=["bf16", "float32"]
)
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize(("num_rows", "num_columns"), [(33, 352), (300, 352), (300, 1056)])
def test_deep_products(
    num_rows: int,
    num_columns: int,
    units: str,
    dtype: torch.dtype,
    most_error: float,
    folders: dict[str, Path],
) -> None:
    """Tiles take the depth in pieces of 4 KB a row: here three, one smaller than the others. Float32 sums have parts.

    A row's product is the same to the last bit whichever rows and threads it is computed with. Of 1,056 columns the
    weights are large: on tiles a group of them meets all rows, or with 5 threads a part of the rows.
    """
    kernels = NativeBackend(
        num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, block_size=32, folder=folders[units]
    )
    generator = torch.Generator().manual_seed(num_rows)
    x, weight = (torch.randn(size, 4160, generator=generator).to(dtype) for size in (num_rows, num_columns))
    packed = kernels.pack(weight)
    assert packed is not None
    expected = x.double() @ weight.double().T
    out = kernels.project(kernels.copy_rows(x), packed)
    assert (out.double() - expected).abs().max() < most_error * expected.abs().max()
    for first, end in ((0, 1), (1, 4), (2, 7), (3, 12), (0, 13), (5, 32)):
        assert torch.equal(kernels.project(kernels.copy_rows(x[first:end]), packed), out[first:end])
    for num_threads in (1, 5):
        torch.set_num_threads(num_threads)
        assert torch.equal(kernels.project(kernels.copy_rows(x), packed), out)


@pytest.mark.parametrize("num_rows", [1, 8, 33])
def test_without_units_for_bf16_its_products_are_those_of_float32_rounded(num_rows: int) -> None:
    products = []
    generator = torch.Generator().manual_seed(num_rows)
    x, weight = (torch.randn(size, 1056, generator=generator).bfloat16() for size in (num_rows, 96))
    for dtype in (torch.bfloat16, torch.float32):
        kernels = NativeBackend(
            num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, block_size=32, folder=compiled(PLAIN, "native")
        )
        packed = kernels.pack(weight.to(dtype))
        assert packed is not None
        products.append(kernels.project(kernels.copy_rows(x.to(dtype)), packed).bfloat16())
    assert torch.equal(*products)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("num_rows", [0, 1, 12, 33, 300])
def test_the_largest_column_is_found_without_the_product(
    num_rows: int, units: str, dtype: torch.dtype, folders: dict[str, Path]
) -> None:
    kernels = NativeBackend(
        num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=dtype, block_size=32, folder=folders[units]
    )
    generator = torch.Generator().manual_seed(num_rows)
    weight, bias = torch.randn(992, 64, generator=generator).to(dtype), torch.randn(992, generator=generator)
    weight[700:800] = weight[100:200]  # of equals, the first one counts
    bias[700:800] = bias[100:200]
    some = torch.randperm(2 * num_rows, generator=generator)[:num_rows]
    for addend in (None, bias.to(dtype)):
        packed = kernels.pack(weight, addend)
        assert packed is not None
        x = torch.randn(2 * num_rows, 64, generator=generator).to(dtype)[some]
        rows = kernels.copy_rows(x)
        assert torch.equal(rows, x)
        expected = rows.double() @ weight.double().T + (0 if addend is None else addend.double())
        found = kernels.largest_column(rows, packed)
        assert found.shape == (num_rows,)
        assert not ((found >= 700) & (found < 800)).any()
        assert torch.allclose(expected[torch.arange(num_rows), found], expected.amax(-1), rtol=1e-5, atol=1e-5)
        assert kernels.project(rows, packed).shape == (num_rows, 992)
        # Masked columns take no part, whole panels of them least of all; rows differ in what they may choose.
        is_allowed = torch.rand(num_rows, 992, generator=generator) < 0.1
        is_allowed[:, 32:320] = False
        is_allowed[::3, :960] = False
        is_allowed[:, 991] = True
        is_allowed[1::7] = True
        bits = is_allowed.view(num_rows, 31, 32).long() << torch.arange(32)
        masks = bits.sum(-1).to(torch.uint32).view(torch.int32)
        found = kernels.largest_column(rows, packed, masks)
        chosen = is_allowed[torch.arange(num_rows), found]
        assert chosen.all()
        largest = mask_logits(expected, masks).amax(-1)
        assert torch.allclose(expected[torch.arange(num_rows), found], largest, rtol=1e-5, atol=1e-5)


def test_head_norms_and_rotation_are_those_of_transformers(folders: dict[str, Path]) -> None:
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    kernels = NativeBackend(
        num_q_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float32, block_size=32, folder=folders["best"]
    )
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(5, 8, 32, generator=generator)
    q_norm, k_norm = (torch.randn(32, generator=generator) for _ in range(2))
    angles = torch.randn(5, 16, generator=generator).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    query, key = norm(heads[:, :4], q_norm), norm(heads[:, 4:6], k_norm)
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    layout = Layout([(0, [(5, 5)])], [0], 32)
    caches = torch.zeros(2, 1, 32, 2, 32)
    qkv = heads.reshape(5, -1).contiguous()
    work = kernels.prepare(layout.batch)
    rotate_and_write_kv(kernels, qkv, cos, sin, *caches, work, q_norm=q_norm, k_norm=k_norm, epsilon=1e-6)
    assert (qkv.view(5, 8, 32)[:, :4] - query).abs().max() < 1e-5
    assert (qkv.view(5, 8, 32)[:, 4:6] - key).abs().max() < 1e-5
    assert torch.equal(qkv.view(5, 8, 32)[:, 6:], heads[:, 6:])
    # Keys come back as the scores of unit queries: sub-blocks of 32 tokens hold 16 tokens' pairs side by side.
    stored = caches[0].view(2, 2, 16, 16, 2).permute(1, 3, 0, 2, 4).reshape(32, 2, 32)
    assert (stored[:5] - key).abs().max() < 1e-5


def test_a_missing_or_broken_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken").write_text("#!/bin/sh\nprintf 'a.cpp: error: first\\n  second\\n' >&2\nexit 1\n")
    (tmp_path / "broken").chmod(0o700)
    for compiler, reason in (
        ("no-such-compiler", "no-such-compiler"),
        ("false", r"/false cannot compile native\.cpp: its exit status is 1\Z"),
        (str(tmp_path / "broken"), r"/broken cannot compile native\.cpp: a\.cpp: error: first second\Z"),
    ):
        load_library.cache_clear()
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(NativeBuildError, match=reason):
            NativeBackend(
                num_q_heads=1, num_kv_heads=1, head_dim=32, dtype=torch.float32, block_size=32, folder=tmp_path
            )
    load_library.cache_clear()
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_size": 16}, "block_size 16 is not a multiple of 32"),
        ({"head_dim": 40}, "head dim 40 is not a multiple of 16"),
        ({"dtype": torch.float16}, "element type torch.float16"),
        ({"num_q_heads": 33}, "33 query heads a KV head"),
    ],
)
def test_what_native_kernels_do_not_cover_is_refused(change: dict[str, object], reason: str, tmp_path: Path) -> None:
    shape = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 32, "dtype": torch.float32, "block_size": 32}
    with pytest.raises(ValueError, match=reason):
        NativeBackend(**(shape | change), folder=tmp_path)


def empty_compiler(folder: Path) -> Path:
    """A compiler that is fast because it compiles an empty file; it has to be called with the argument "really"."""
    compiler = folder / "c++"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = really ] || exit 1\n[ "$2" = --version ] && exit\nfor made; do :; done\n'
        f'g++ -shared -x c++ {os.devnull} -o "$made"\n'
    )
    compiler.chmod(0o700)
    return compiler


def test_a_damaged_library_is_compiled_again(tmp_path: Path) -> None:
    """In new processes, since a loaded library is kept. Flags for other programs' builds change nothing."""
    compiler = empty_compiler(tmp_path)
    load = (
        "from pathlib import Path; from engine.kernels.cpu.native_build import load_library\n"
        f"load_library(Path({str(tmp_path)!r}), 'native')"
    )

    def run(**environment: str) -> bytes:
        variables = os.environ | {"CXX": f"{compiler} really"} | environment
        subprocess.run([sys.executable, "-c", load], env=variables, check=True)
        (library,) = tmp_path.glob("*.so")
        return library.read_bytes()

    whole = run()
    (library,) = tmp_path.glob("*.so")
    for damaged in (b"", b"no library"):
        library.write_bytes(damaged)
        assert run(CXXFLAGS="-march=nocona") == whole


def test_a_process_that_compiles_several_sources_says_so_once(tmp_path: Path) -> None:
    compiler = empty_compiler(tmp_path)
    load = (
        "import logging; from pathlib import Path; from engine.kernels.cpu.native_build import load_library\n"
        "logging.basicConfig(level=logging.INFO)\n"
        f"for source in ('native', 'quantized', 'int8'): load_library(Path({str(tmp_path)!r}), source)"
    )
    environment = os.environ | {"CXX": f"{compiler} really"}
    done = subprocess.run([sys.executable, "-c", load], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("compiling the C++ kernels for this processor") == 1
    assert len(list(tmp_path.glob("*.so"))) == 3
