"""Quantized weights: what files have is what products read, and products give the bits of unpacked weights."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.kernels.cpu.native import NativeBackend
from engine.kernels.cpu.native_build import load_library
from engine.kernels.cpu.native_layers import PackedOutputLayer
from engine.kernels.cpu.quantized import HALF, KINDS, PLAIN_KIND, QuantizedColumns, QuantizedWeight, element_type
from engine.kernels.torch_output_layer import mask_logits
from tests.engine.kernels.compiled_units import PLAIN, VECTORS, compiled
from tests.engine.kernels.ragged_batches import CPU_FLAGS
from tests.engine.model.quantized_files import random_rows, unpacked

UNITS = {"best": "", "plain": PLAIN}
if "amx_bf16" in CPU_FLAGS:  # else VECTORS leaves nothing out
    UNITS["vectors"] = VECTORS


@pytest.fixture(scope="module", params=UNITS)
def library(request: pytest.FixtureRequest) -> tuple[ctypes.CDLL, Path]:
    """The kernels, with tiles where there are some, without, and for CPUs that do not multiply bfloat16."""
    folder = compiled(UNITS[request.param], "native", "quantized")
    return load_library(folder, "quantized"), folder


def backend_of(library: tuple[ctypes.CDLL, Path]) -> NativeBackend:
    shape = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 64, "block_size": 32}
    return NativeBackend(dtype=element_type(library[0]), folder=library[1], **shape)


def columns_of(
    library: ctypes.CDLL, kind: str, raw: np.ndarray, depth: int, order: np.ndarray | None = None
) -> QuantizedColumns:
    found = QuantizedColumns(library, KINDS.get(kind, PLAIN_KIND), depth=depth, num_columns=len(raw))
    rows = np.full(len(found.panels) * HALF, -1)
    rows[: len(raw)] = np.arange(len(raw)) if order is None else order
    found.fill(0, rows, raw)
    return found


@pytest.mark.parametrize("kind", [*KINDS, "not quantized"])
def test_weights_are_those_of_the_file(kind: str, library: tuple[ctypes.CDLL, Path]) -> None:
    """All codes, rows in another order, and a number of columns that fills no panel."""
    rng, dtype = np.random.default_rng(1), element_type(library[0])
    if kind not in KINDS:
        kind = "BF16" if dtype == torch.bfloat16 else "F32"
    raw, order = random_rows(kind, 70, 768, rng), rng.permutation(70)
    packed = columns_of(library[0], kind, raw, 768, order)
    table = PackedOutputLayer(backend_of(library), QuantizedWeight([packed]))
    expected = torch.from_numpy(unpacked(raw, kind)).to(dtype)[order]
    ids = torch.tensor([[0, 69, 16], [5, 5, 48]])
    assert torch.equal(table.weights_of(ids), expected[ids])
    assert torch.equal(table.weights_of(torch.arange(70)), expected)
    assert torch.equal(table.weights_of(torch.arange(70)[::2]), expected[::2])
    assert packed.panels.nbytes <= 80 / 70 * 1.03 * raw.nbytes


@pytest.mark.parametrize("num_rows", [1, 12, 33, 300])
def test_the_output_layer_gives_the_bits_of_unpacked_weights(num_rows: int, library: tuple[ctypes.CDLL, Path]) -> None:
    """Columns of three formats, one after the other; each row is what it is alone."""
    rng, dtype = np.random.default_rng(num_rows), element_type(library[0])
    kinds = {"Q4_K": 32, "Q6_K": 16, "Q8_0": 80}
    raw = {kind: random_rows(kind, size, 512, rng) for kind, size in kinds.items()}
    weight = torch.from_numpy(np.concatenate([unpacked(rows, kind) for kind, rows in raw.items()])).to(dtype)
    bias = torch.from_numpy(rng.normal(size=128)).to(dtype)
    parts = [columns_of(library[0], kind, rows, 512) for kind, rows in raw.items()]
    backend = backend_of(library)
    quantized = PackedOutputLayer(backend, QuantizedWeight(parts, bias))
    plain = backend.make_output_layer(weight, bias)
    assert isinstance(plain, PackedOutputLayer)
    hidden = torch.from_numpy(rng.normal(size=(num_rows, 512))).to(dtype)
    logits = quantized.logits(hidden)
    expected = hidden.double() @ weight.double().T + bias.double()
    assert (logits.double() - expected).abs().max() <= (
        2**-7 if dtype == torch.bfloat16 else 2**-18
    ) * expected.abs().max()
    assert torch.equal(logits, plain.logits(hidden))
    assert torch.equal(logits[-1:], quantized.logits(hidden[-1:]))
    assert torch.equal(quantized.most_likely(hidden), plain.most_likely(hidden))
    allowed = torch.zeros(num_rows, 4, dtype=torch.int32)
    allowed[:, 2], allowed[num_rows // 2, 0] = 0b1010, 1
    assert torch.equal(quantized.most_likely(hidden, allowed), plain.most_likely(hidden, allowed))
    some = torch.tensor([3, 127, 40])
    assert torch.equal(quantized.label_logits(hidden, some), plain.label_logits(hidden, some))


def test_columns_that_are_not_there_are_never_the_largest(library: tuple[ctypes.CDLL, Path]) -> None:
    rng, dtype = np.random.default_rng(0), element_type(library[0])
    raw = random_rows("Q4_0", 40, 64, rng)
    weight = QuantizedWeight([columns_of(library[0], "Q4_0", raw, 64)])
    layer = PackedOutputLayer(backend_of(library), weight)
    hidden = torch.from_numpy(rng.normal(size=(50, 64))).to(dtype)
    logits = layer.logits(hidden)
    assert logits.shape == (50, 40)
    assert layer.most_likely(hidden).max() < 40
    allowed = torch.full((50, 2), -1, dtype=torch.int32)
    assert torch.equal(layer.most_likely(hidden, allowed), layer.most_likely(hidden))
    assert (mask_logits(logits.float(), allowed).argmax(-1) < 40).all()
