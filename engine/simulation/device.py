"""A roofline: a device's peak rates, the share that a step is assumed to reach, and the resulting cost of a step.

A step takes the time of its operations (linear layers and attention) or of its memory traffic (weights, KV read and
written; a shared prefix is read once, as in RelayAttention section 3.4), whichever is longer, and the host's time to
launch it. Sampling and scheduling are not counted.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from engine.errors import ConfigError
from engine.model.model_shape import ModelShape

_TERA = 1e12
_GB = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Rates of one device, as one process sees it.

    Attributes:
        name: value of the option `--device`.
        peak_flops: number format to dense operations per second; a multiplication and an addition are two.
        peak_bytes_per_second: of reading memory.
        memory_bytes: of the device; weights and KV share it.
        compute_efficiency, memory_efficiency: fraction of the peaks that a step is assumed to reach, 0 to 1.
        host_s_per_layer: seconds that the host takes to launch one layer of a step.
        overlaps_host: whether the device computes meanwhile; not so for a CPU, which is its own host.
    """

    name: str
    title: str
    peak_flops: Mapping[str, float]
    peak_bytes_per_second: float
    memory_bytes: int
    compute_efficiency: float
    memory_efficiency: float
    host_s_per_layer: float
    overlaps_host: bool
    source: str

    def flops_per_second(self, dtype: str) -> float:
        """Operations per second that a step is assumed to reach; `ConfigError` if the format has no rate."""
        if dtype not in self.peak_flops:
            known = ", ".join(self.peak_flops)
            raise ConfigError(f"device {self.name!r} has no rate for dtype {dtype!r}; there are {known}")
        return self.peak_flops[dtype] * self.compute_efficiency

    @property
    def bytes_per_second(self) -> float:
        """Bytes of memory traffic per second that a step is assumed to reach."""
        return self.peak_bytes_per_second * self.memory_efficiency


def _gpu(
    name: str, title: str, *, half: float, single: float, gbs: float, memory_gb: int, source: str, fp8: float = 0.0
) -> Device:
    """A GPU from its data sheet: dense TFLOPS in 16-bit formats, in float32 and in fp8 if it has it, GB/s, GB.

    The efficiencies are those that explain ten batches of an 8B model in bfloat16 on an H200 within 6 % each
    (docs/explain.md), and an assumption for all other GPUs, models and formats.
    """
    return Device(
        name=name,
        title=title,
        peak_flops={"bfloat16": half * _TERA, "float16": half * _TERA, "float32": single * _TERA}
        | ({"fp8": fp8 * _TERA} if fp8 else {}),
        peak_bytes_per_second=gbs * _GB,
        memory_bytes=memory_gb * _GB,
        compute_efficiency=0.63,
        memory_efficiency=0.75,
        host_s_per_layer=0.2e-3,
        overlaps_host=True,
        source=source,
    )


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("a100", "NVIDIA A100 80GB SXM", half=312, single=19.5, gbs=2039, memory_gb=80,
             source="NVIDIA A100 data sheet"),
        _gpu("h100", "NVIDIA H100 SXM", half=989.4, single=67, fp8=1978.9, gbs=3350, memory_gb=80,
             source="NVIDIA H100 data sheet (without sparsity)"),
        _gpu("h200", "NVIDIA H200 SXM", half=989.4, single=67, fp8=1978.9, gbs=4800, memory_gb=141,
             source="NVIDIA H200 data sheet (without sparsity)"),
        _gpu("mi250", "AMD Instinct MI250, one of its two dies", half=181, single=45.3, gbs=1638, memory_gb=64,
             source="AMD Instinct MI250 data sheet, halved: a process sees one die"),
        _gpu("mi300x", "AMD Instinct MI300X", half=1307.4, single=163.4, fp8=2614.9, gbs=5300, memory_gb=192,
             source="AMD Instinct MI300X data sheet"),
    )
}  # fmt: skip
"""Devices by name. Others can be measured: `engine.simulation.device_probe`."""

_SLOWER_FORMS = frozenset({"pcie", "nvl"})
"""Words in the names of slower variants of the products in the table."""


def match_device(product: str, memory_bytes: int) -> Device | None:
    """The table's entry for a product by the driver's name; None where there is none with its rates. A product with
    other memory, such as an A100 of 40 GB, has other rates."""
    words = set(re.findall(r"[a-z0-9]+", product.lower()))
    if words & _SLOWER_FORMS:
        return None
    named = [device for device in DEVICES.values() if words & {device.name, f"{device.name}x"}]
    return next((device for device in named if abs(memory_bytes / device.memory_bytes - 1) < 0.1), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Counts of one step.

    Attributes:
        num_rows: tokens that go through the layers; as many KV tokens are written.
        num_output_rows: of these, rows that go through the whole output layer.
        num_attention_pairs: causal (query token, key token) pairs; where windows differ, the mean over the layers.
        num_kv_tokens_read: KV tokens that attention reads from memory; likewise the mean over the layers.
    """

    num_rows: int
    num_output_rows: int
    num_attention_pairs: float
    num_kv_tokens_read: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds of one step for computation, for memory traffic, for the host's launches, and together."""

    compute_s: float
    memory_s: float
    host_s: float
    seconds: float


class Roofline:
    """The cost of steps of one model in one number format on one device."""

    def __init__(self, shape: ModelShape, device: Device, dtype: str) -> None:
        """Raises `ConfigError` where the device has no rate for `dtype`."""
        self._shape, self._device = shape, device
        self._flops_per_second = device.flops_per_second(dtype)

    @property
    def window_shares(self) -> list[tuple[int, float]]:
        """Number of positions that a row sees, 0 for all, and the share of the layers with this window."""
        return [(window, count / self._shape.num_layers) for window, count in self._shape.layers_by_window.items()]

    def count_flops(self, work: StepWork) -> float:
        """Operations of a step."""
        shape = self._shape
        flops = 2 * (work.num_rows * shape.num_layer_weights + work.num_output_rows * shape.num_head_weights)
        return flops + work.num_attention_pairs * shape.flops_per_attention_pair

    def count_bytes(self, work: StepWork) -> float:
        """Weights and KV that a step reads, and KV that it writes."""
        shape = self._shape
        num_bytes = shape.num_read_weights(work.num_rows) * shape.bytes_per_weight
        num_bytes += shape.head_bytes if work.num_output_rows else 0
        return num_bytes + (work.num_kv_tokens_read + work.num_rows) * shape.kv_bytes_per_token

    def cost(self, work: StepWork) -> StepCost:
        """The cost of a step; host and device work one after the other unless the device overlaps the host."""
        compute_s = self.count_flops(work) / self._flops_per_second
        memory_s = self.count_bytes(work) / self._device.bytes_per_second
        host_s, device_s = self._shape.num_layers * self._device.host_s_per_layer, max(compute_s, memory_s)
        seconds = max(device_s, host_s) if self._device.overlaps_host else device_s + host_s
        return StepCost(compute_s=compute_s, memory_s=memory_s, host_s=host_s, seconds=seconds)
