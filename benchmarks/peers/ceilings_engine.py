"""Measures the machine itself: the rate of the model's matrix products, and memory bandwidth."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import linear

from benchmarks.measuring.model_folder import read_model_shape
from benchmarks.peers.protocol import Loaded, LoadSettings, serve
from engine.simulation.device_probe import best_seconds

MOST_LAYERS = 8
"""Layers whose weights are used in turn, so that caches do not hold them all; a large model needs fewer."""

MOST_WEIGHT_BYTES = 4 * 1024**3
ROWS = (512, 1024, 2048, 4096)
MANY_ROWS = 16384
"""Measured as well on a GPU, where launches by the host bound products of few rows."""

COPY_BYTES = 1 << 29
"""More than caches hold; `--options '{"ceilings": {"copy_bytes": N}}'` copies others."""

Product = Callable[[torch.Tensor], torch.Tensor]


class CeilingsEngine:
    """The best rate of several implementations and sizes is the ceiling."""

    def load(self, settings: LoadSettings) -> Loaded:
        torch.set_num_threads(settings.num_threads)
        self._device = torch.device(settings.device)
        self._dtype = _timed_dtype(settings)
        self._copy_bytes = settings.options.get("copy_bytes", COPY_BYTES)
        self._shape = read_model_shape(Path(settings.model), str(self._dtype).removeprefix("torch."))
        self._best: tuple[str, list[tuple[int, int, Product]], int] | None = None
        return Loaded(versions={"torch": torch.__version__})

    @torch.inference_mode()
    def measure(self, _: dict[str, object]) -> dict[str, object]:
        """Operations per second by kind of product and number of rows, and bytes per second of a large copy.

        The first call tries every kind; later calls measure only the fastest one, for a second.
        """
        rates: dict[str, float] = {}
        if self._best is not None:
            name, products, rows = self._best
            rates[name] = self._rate(products, rows)
        else:
            for kind, products in self._products().items():
                for rows in (*ROWS, MANY_ROWS) if self._device.type == "cuda" else ROWS:
                    name = f"{kind}, {rows} rows"
                    rates[name] = self._rate(products, rows)
                    if rates[name] == max(rates.values()):
                        self._best = name, products, rows
        device = torch.cuda.get_device_name() if self._device.type == "cuda" else "CPU"
        return {
            "device": device,
            "matrix_flops_per_second": max(rates.values()),
            "by_product": rates,
            "copy_bytes_per_second": self._bandwidth(),
        }

    def _products(self) -> dict[str, list[tuple[int, int, Product]]]:
        """By kind, the products of the layers in turn: (inputs, outputs, call)."""
        shape = self._shape
        q, kv = shape.num_q_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        hidden, inner = shape.hidden_size, shape.intermediate_size
        kinds = {
            "as stored": [
                (hidden, q),
                (hidden, kv),
                (hidden, kv),
                (q, hidden),
                *[(hidden, inner)] * 2,
                (inner, hidden),
            ],
            "fused": [(hidden, q + 2 * kv), (q, hidden), (hidden, 2 * inner), (inner, hidden)],
        }
        layer_bytes = shape.num_layer_weights // shape.num_layers * shape.value_bytes
        num_layers = max(1, min(shape.num_layers, MOST_LAYERS, MOST_WEIGHT_BYTES // layer_bytes))
        if self._dtype == torch.int8:
            return {"fused, packed": [self._int8(*size) for _ in range(num_layers) for size in kinds["fused"]]}
        found = {
            name: [self._plain(*size) for _ in range(num_layers) for size in sizes] for name, sizes in kinds.items()
        }
        if self._device.type == "cpu" and torch.backends.mkldnn.is_available():
            found["fused, packed"] = [self._packed(*size) for _ in range(num_layers) for size in kinds["fused"]]
        return found

    def _weight(self, num_in: int, num_out: int) -> torch.Tensor:
        return _random(num_out, num_in, self._device, self._dtype)

    def _plain(self, num_in: int, num_out: int) -> tuple[int, int, Product]:
        weight = self._weight(num_in, num_out)
        return num_in, num_out, lambda rows: linear(rows, weight)

    def _packed(self, num_in: int, num_out: int) -> tuple[int, int, Product]:
        """With weights in oneDNN's packed layout."""
        weight = torch.ops.mkldnn._reorder_linear_weight(self._weight(num_in, num_out), 1024)
        return num_in, num_out, lambda rows: torch.ops.mkldnn._linear_pointwise(rows, weight, None, "none", [], "")

    def _int8(self, num_in: int, num_out: int) -> tuple[int, int, Product]:
        """oneDNN's product of unsigned rows with signed weights, a scale for each output."""
        weight = torch.ops.onednn.qlinear_prepack(self._weight(num_in, num_out), None)
        scales, zero_points = torch.ones(num_out), torch.zeros(num_out, dtype=torch.int32)
        fixed = (weight, scales, zero_points, None, 1.0, 0, torch.bfloat16, "none", [], "")
        return num_in, num_out, lambda rows: torch.ops.onednn.qlinear_pointwise(rows, 0.1, 0, *fixed)

    def _rate(self, products: list[tuple[int, int, Product]], num_rows: int) -> float:
        widths = {num_in for num_in, _, _ in products}
        dtype = torch.uint8 if self._dtype == torch.int8 else self._dtype
        inputs = {width: _random(num_rows, width, self._device, dtype) for width in widths}
        flops = 2 * num_rows * sum(num_in * num_out for num_in, num_out, _ in products)

        def once() -> None:
            for num_in, _, product in products:
                product(inputs[num_in])

        return flops / best_seconds(once, self._device)

    def _bandwidth(self) -> float:
        source = torch.ones(self._copy_bytes // 4, device=self._device)
        target = torch.empty_like(source)
        return 2 * self._copy_bytes / best_seconds(lambda: target.copy_(source), self._device)


def _timed_dtype(settings: LoadSettings) -> torch.dtype:
    """The dtype asked for, or float32 on a CPU without AVX-512's products for it: oneDNN has only a reference there."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    is_slow = {torch.bfloat16: not torch.cpu._is_avx512_supported(), torch.int8: not torch.cpu._is_vnni_supported()}
    return torch.float32 if settings.device == "cpu" and is_slow.get(dtype, False) else dtype


def _random(num_rows: int, num_columns: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if not dtype.is_floating_point:
        return torch.randint(0, 100, (num_rows, num_columns), device=device, dtype=dtype)
    return torch.randn(num_rows, num_columns, device=device).to(dtype)


if __name__ == "__main__":
    serve(CeilingsEngine())
