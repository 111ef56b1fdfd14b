"""The launches of a GPU's layers against float64 twins, and whole layers; program.py runs them.

Inputs are views into larger tensors, so that no row follows the one before. Outputs are NaN before they are written and
lie between guard values.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from benchmarks.kernels.attention_batches import make_batch
from engine.kernels.decoder_layer import LayerWeights, TabledWork
from engine.kernels.reference import paged_attention_ref
from engine.kernels.scoring import Scoring
from engine.kernels.triton.layers.layer_kernels import add_rms_norm, rotate_and_write_kv, swiglu
from engine.kernels.triton.triton_attention import TritonAttention
from tests.engine.kernels.triton.cases import BACKENDS, GUARD, MIXED
from tests.engine.kernels.twins import add_rms_norm_ref, rotate_and_write_kv_ref, swiglu_ref

RELATIVE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Largest error, over 1 plus the size of the result: a rounding or two to the dtype."""
EPSILON = 1e-5


class Guarded:
    """Tensors that lie between guard values: random inputs, and outputs of NaN."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)
        self._outputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def draw(self, *shape: int) -> torch.Tensor:
        view = self._surrounded(*shape)[1]
        return view.copy_(torch.randn(shape, generator=self._generator))

    def output(self, *shape: int) -> torch.Tensor:
        whole, view = self._surrounded(*shape)
        view.fill_(torch.nan)
        self._outputs.append((whole, view))
        return view

    def problems(self) -> Iterator[str]:
        """What is wrong around and in the outputs; they are overwritten."""
        for whole, view in self._outputs:
            if view.isnan().any():
                yield "an element was not written"
            view.fill_(GUARD)
            if not (whole == GUARD).all():
                yield "wrote outside of the output"

    def _surrounded(self, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.full([size + 2 for size in shape[:-1]] + [shape[-1] + 8], GUARD, dtype=self.dtype)
        return whole, whole[(*(slice(1, -1) for _ in shape[:-1]), slice(0, shape[-1]))]


class Findings:
    """What was found wrong, in words, and the largest error."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.worst = 0.0

    def compare(
        self, what: str, found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, num_roundings: int = 1
    ) -> None:
        allowed = RELATIVE[dtype] * num_roundings
        error = ((found.double() - expected).abs() / (1 + expected.abs())).max().nan_to_num(torch.inf)
        self.worst = max(self.worst, float(error))
        if not error <= allowed:
            self.problems.append(f"{what}: largest error {float(error)}, allowed {allowed}")

    def refused(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except ValueError:
            return
        self.problems.append(f"{what} was accepted")

    @property
    def result(self) -> tuple[list[str], float]:
        return self.problems, self.worst


def doubles(*tensors: torch.Tensor | None) -> list[Any]:
    return [None if tensor is None else tensor.double() for tensor in tensors]


def run_add_rms_norm() -> tuple[list[str], float]:
    findings = Findings()
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    for dtype, size in itertools.product(dtypes, (1, 63, 64, 65, 96, 255, 256, 257, 1000)):
        for has_addend, rows in ((False, None), (True, None), (True, [4, 0, 4]), (True, [2])):
            guarded = Guarded(dtype, seed=size)
            residual, weight = guarded.draw(5, size), guarded.draw(size)
            picked = None if rows is None else torch.tensor(rows)
            num_rows = 5 if rows is None else len(rows)
            addend = guarded.draw(num_rows, size) if has_addend else None
            before = residual.clone()
            total, normed = add_rms_norm(
                residual, weight, EPSILON, addend=addend, rows=picked, normed=guarded.output(num_rows, size)
            )
            where = f"{dtype}, size {size}, addend {has_addend}, rows {rows}"
            expected, _ = add_rms_norm_ref(*doubles(residual, weight), EPSILON, addend=doubles(addend)[0], rows=picked)
            findings.compare(f"{where}: sum", total, expected, dtype)
            # The norm is that of the rounded sum, which the next addition reads.
            findings.compare(f"{where}: norm", normed, add_rms_norm_ref(*doubles(total, weight), EPSILON)[1], dtype)
            if not torch.equal(residual, before):
                findings.problems.append(f"{where}: the residual stream was overwritten")
            findings.problems += [f"{where}: {problem}" for problem in guarded.problems()]
    residual, weight = torch.ones(3, 8), torch.ones(8)
    findings.refused("an addend of another shape", lambda: add_rms_norm(residual, weight, 1e-5, addend=weight[None]))
    findings.refused("another dtype", lambda: add_rms_norm(residual, weight.half(), 1e-5))
    findings.refused("columns apart", lambda: add_rms_norm(torch.ones(8, 3).t(), weight, 1e-5))
    findings.refused("rows alone", lambda: add_rms_norm(residual, weight, 1e-5, rows=torch.tensor([0])))
    return findings.result


def run_rotate_and_write_kv() -> tuple[list[str], float]:
    findings = Findings()
    shapes: Sequence[tuple[int, int, int, torch.dtype, bool]] = (
        *((1, 1, dim, torch.float32, has_norms) for dim in (64, 96, 128) for has_norms in (False, True)),
        *((heads, kv, 64, torch.float32, True) for heads, kv in ((7, 1), (8, 8), (9, 3), (17, 17), (15, 5))),
        *((6, 2, dim, dtype, True) for dim in (64, 96, 128) for dtype in (torch.float16, torch.bfloat16)),
        (9, 9, 128, torch.bfloat16, False),
        (3, 1, 8, torch.float32, True),
    )
    for num_q_heads, num_kv_heads, head_dim, dtype, has_norms in shapes:
        guarded = Guarded(dtype, seed=head_dim + num_q_heads)
        # Slots of the first, last and middle tokens of blocks, and a row that goes nowhere; one slot more than rows.
        slots = torch.tensor([15, 16, -1, 0, 47, 40, 99])
        num_rows = len(slots) - 1
        qkv = guarded.draw(num_rows, (num_q_heads + 2 * num_kv_heads) * head_dim)
        norms = dict.fromkeys(("q_norm", "k_norm"))
        if has_norms:
            norms = {name: guarded.draw(head_dim) for name in norms}
        # The halves' angles differ, as they need not in any family: a kernel that took one for both would show.
        angles = torch.randn(num_rows, head_dim + 4, generator=torch.Generator().manual_seed(1))
        cos, sin = angles.cos()[:, :head_dim], angles.sin()[:, :head_dim]
        caches = [torch.full((4, 16, num_kv_heads + 1, head_dim), GUARD, dtype=dtype) for _ in range(2)]
        views = [cache[:, :, :num_kv_heads] for cache in caches]
        expected_caches = [cache.double() for cache in caches]
        query = rotate_and_write_kv(
            qkv, cos, sin, *views, slots, num_q_heads=num_q_heads, **norms, epsilon=EPSILON,
            query=guarded.output(num_rows, num_q_heads, head_dim),
        )  # fmt: skip
        expected = rotate_and_write_kv_ref(
            qkv.double().contiguous(), *doubles(cos, sin), *(cache[:, :, :num_kv_heads] for cache in expected_caches),
            slots, num_q_heads=num_q_heads, epsilon=EPSILON,
            **dict(zip(norms, doubles(*norms.values()), strict=True)),
        )  # fmt: skip
        where = f"{num_q_heads} over {num_kv_heads} heads of {head_dim}, {dtype}, norms {has_norms}"
        findings.compare(f"{where}: query", query, expected, dtype)
        for cache, wanted in zip(caches, expected_caches, strict=True):
            findings.compare(f"{where}: cache", cache, wanted, dtype)
            if ((cache == GUARD) != (wanted == GUARD)).any():
                findings.problems.append(f"{where}: wrote something else than the step's slots")
        findings.problems += [f"{where}: {problem}" for problem in guarded.problems()]
    qkv, angles, cache, slots = torch.ones(3, 128), torch.ones(3, 32), torch.ones(2, 16, 1, 32), torch.arange(3)

    def call(**changed: Any) -> Callable[[], object]:
        given = {"qkv": qkv, "cos": angles, "sin": angles, "k_cache": cache, "v_cache": cache, "slots": slots}
        return lambda: rotate_and_write_kv(**{**given, "num_q_heads": 2, **changed})

    call()()
    for what, changed in {
        "heads that do not fit": {"num_q_heads": 3},
        "too few slots": {"slots": slots[:2]},
        "slots of 32 bits": {"slots": slots.int()},
        "angles of 64 bits": {"cos": angles.double()},
        "a cache of another dtype": {"v_cache": cache.half()},
        "caches of different strides": {"v_cache": torch.ones(2, 16, 2, 32)[:, :, :1]},
        "one norm of two": {"q_norm": angles[0]},
        "columns apart": {"qkv": torch.ones(128, 3).t()},
    }.items():
        findings.refused(what, call(**changed))
    return findings.result


def run_swiglu() -> tuple[list[str], float]:
    findings = Findings()
    sizes = (1, 160, 1023, 1024, 1025)
    for dtype, size, num_rows in itertools.product((torch.float32, torch.float16, torch.bfloat16), sizes, (1, 3)):
        guarded = Guarded(dtype, seed=size)
        gate_up = guarded.draw(num_rows, 2 * size)
        gate_up[0, 0] = -200.0  # its exponential overflows
        out = swiglu(gate_up, guarded.output(num_rows, size))
        where = f"{dtype}, {num_rows} rows of {size}"
        findings.compare(where, out, swiglu_ref(gate_up.double()), dtype)
        findings.problems += [f"{where}: {problem}" for problem in guarded.problems()]
    findings.refused("an odd number of columns", lambda: swiglu(torch.ones(2, 5)))
    findings.refused("another dtype", lambda: swiglu(torch.ones(2, 4), torch.ones(2, 2).half()))
    return findings.result


class LaunchCounter(TorchDispatchMode):
    """Counts what a device would launch: torch operations that are neither views nor allocations, and kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []
        self._is_within_kernel = False
        self._run = GridExecutor.__call__

    def __enter__(self) -> "LaunchCounter":
        def count(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            self.launched.append(executor.fn.__name__)
            self._is_within_kernel = True
            try:
                self._run(executor, *args, **kwargs)
            finally:
                self._is_within_kernel = False

        GridExecutor.__call__ = count
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        GridExecutor.__call__ = self._run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not (self._is_within_kernel or func.is_view or "empty" in str(func)):
            self.launched.append(str(func))
        return func(*args, **(kwargs or {}))


def draw_layer(num_q_heads: int, num_kv_heads: int, head_dim: int, has_extras: bool, seed: int) -> LayerWeights:
    hidden, intermediate = 96, 160
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def linear(num_columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return draw(num_columns, depth), draw(num_columns) if has_extras else None

    return LayerWeights(
        attention_norm=draw(hidden),
        qkv=linear((num_q_heads + 2 * num_kv_heads) * head_dim, hidden),
        output=linear(hidden, num_q_heads * head_dim),
        mlp_norm=draw(hidden),
        gate=draw(intermediate, hidden),
        up=draw(intermediate, hidden),
        down=draw(hidden, intermediate),
        q_norm=draw(head_dim) if has_extras else None,
        k_norm=draw(head_dim) if has_extras else None,
        epsilon=EPSILON,
        scoring=Scoring(scale=head_dim**-0.5),
    )


def end_with_norm(layers: list[LayerWeights]) -> list[LayerWeights]:
    """The layers of a model whose last one norms what it leaves."""
    weight = torch.linspace(0.5, 2.0, len(layers[-1].mlp_norm))
    return [*layers[:-1], replace(layers[-1], final_norm=weight)]


def launch_problems(launched: list[str], expected: list[int]) -> Iterator[str]:
    """Unless each layer, which begins with every other norm, takes as many launches, and one norm follows the last."""
    norms = [index for index, name in enumerate(launched) if name == "_add_rms_norm_kernel"]
    if np.diff(norms[::2]).tolist() != expected or norms[-1] != len(launched) - 1:
        yield f"not {expected} launches a layer and a norm: {launched}"


def run_layers() -> tuple[list[str], float]:
    """Three layers against float64, with and without output rows, and how many launches they take."""
    findings = Findings()
    num_q_heads, num_kv_heads, head_dim = 6, 2, 32
    batch, num_blocks = make_batch(MIXED, 16)
    num_rows = batch.num_rows
    generator = torch.Generator().manual_seed(7)
    angles = torch.randn(num_rows, head_dim // 2, generator=generator).repeat(1, 2)
    hidden = torch.randn(num_rows, 96, generator=generator)
    kv = torch.randn(3, 2, num_blocks, 16, num_kv_heads, head_dim, generator=generator)
    in_no_order = torch.tensor([num_rows - 1, 3, 0, 3])
    for has_extras, output_rows, name in ((False, None, "paged"), (True, in_no_order, "fused")):
        layers = end_with_norm([draw_layer(num_q_heads, num_kv_heads, head_dim, has_extras, seed) for seed in range(3)])
        shape = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": 16}
        settings = {"dtype": torch.float32, "device": torch.device("cpu")}
        backend: TritonAttention = BACKENDS[name](**shape, **settings)
        computed = backend.make_layers(iter(layers))
        assert computed is not None
        keys, values = ([cache.clone() for cache in kv[:, i]] for i in range(2))
        work = TabledWork([backend.prepare(batch)], [0] * len(layers))
        given, rotation = hidden.clone(), (angles.cos(), angles.sin())
        with torch.inference_mode(), LaunchCounter() as counter:
            out = computed(given, (keys, values), work, rotation, output_rows)
        # One more in the last layer: the output rows.
        findings.problems += launch_problems(counter.launched, [9, 9, 9 + (output_rows is not None)])
        expected_kv, expected = kv.double(), hidden.double()
        slots = torch.from_numpy(batch.slot_mapping)
        for layer, caches in zip(layers, expected_kv, strict=True):
            expected = layer_ref(layer, expected, angles.double(), caches, slots, batch, num_q_heads)
        wanted = expected if output_rows is None else expected[output_rows]
        _, wanted = add_rms_norm_ref(wanted, layers[-1].final_norm.double(), EPSILON)
        findings.compare(f"{name}, extras {has_extras}", out, wanted, torch.float32, num_roundings=10)
        for found, cache in zip((*keys, *values), (*expected_kv[:, 0], *expected_kv[:, 1]), strict=True):
            findings.compare(f"{name}, extras {has_extras}: KV", found, cache, torch.float32, num_roundings=10)
    return findings.result


def layer_ref(
    layer: LayerWeights,
    hidden: torch.Tensor,
    angles: torch.Tensor,
    caches: torch.Tensor,
    slots: torch.Tensor,
    batch: Any,
    num_q_heads: int,
) -> torch.Tensor:
    """A layer in float64; writes KV to caches ``[2, ...]``."""

    def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, *doubles(weight, bias))

    _, normed = add_rms_norm_ref(hidden, layer.attention_norm.double(), layer.epsilon)
    q_norm, k_norm = doubles(layer.q_norm, layer.k_norm)
    query = rotate_and_write_kv_ref(
        product(normed, *layer.qkv), angles.cos(), angles.sin(), *caches, slots,
        num_q_heads=num_q_heads, q_norm=q_norm, k_norm=k_norm, epsilon=layer.epsilon,
    )  # fmt: skip
    attended = paged_attention_ref(query, *caches, batch, layer.scoring).flatten(1)
    hidden = hidden + product(attended, *layer.output)
    _, normed = add_rms_norm_ref(hidden, layer.mlp_norm.double(), layer.epsilon)
    gate_up = torch.cat([product(normed, layer.gate), product(normed, layer.up)], dim=-1)
    return hidden + product(swiglu_ref(gate_up), layer.down)


RUNS = {
    "add_rms_norm": run_add_rms_norm,
    "rotate_and_write_kv": run_rotate_and_write_kv,
    "swiglu": run_swiglu,
    "layers": run_layers,
}
