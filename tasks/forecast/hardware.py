"""The device for which a run is predicted, and its memory for KV; no weights are read."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from engine.config import Dtype, EngineConfig
from engine.device.free_memory import MOST_CPU_KV_BYTES
from engine.device.placement import dtype_name, find_dtype, resolve_device
from engine.errors import CapacityError, ConfigError
from engine.limits import check_kv_budget
from engine.model.loading.checkpoint import is_quantized, read_json
from engine.model.model_shape import ModelShape
from engine.planning.group import PrefixGroup
from engine.request import Request
from engine.simulation.device import DEVICES, Device, Roofline
from engine.simulation.simulation import SimulationSummary, simulate_plan, summarize_steps
from engine.simulation.step_tokens import resolve_step_tokens
from tasks.workers.engine_team import EngineTeam

if TYPE_CHECKING:  # importing torch takes seconds
    import torch

_MEASURED = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The device for which a run is predicted, with the model on it. `dtype` is that of computation, KV and weights
    that are not quantized (the shape's value_bytes is its size)."""

    device: Device
    dtype: str
    shape: ModelShape

    @property
    def free_bytes(self) -> int:
        """Memory of the device beside the weights; below 0 if these do not fit."""
        return self.device.memory_bytes - self.shape.weight_bytes

    def kv_bytes(self, config: EngineConfig) -> int:
        """Memory for KV; `CapacityError` if it does not fit beside the weights, or is too small for one block."""
        memory_bytes, weight_bytes = self.device.memory_bytes, self.shape.weight_bytes
        if config.kv_memory_bytes == "auto":
            most_bytes = MOST_CPU_KV_BYTES if self.device.name == "cpu" else memory_bytes
            kv_bytes = min(max(0, int(config.memory_fraction * self.free_bytes)), most_bytes)
        else:
            kv_bytes = config.kv_memory_bytes * config.tensor_parallel_size  # of each GPU
        if not config.block_size * self.shape.kv_bytes_per_token <= kv_bytes <= self.free_bytes:
            raise CapacityError(
                f"device {self.device.name!r} has {_gigabytes(memory_bytes)} of memory, the weights take "
                f"{_gigabytes(weight_bytes)}: a KV budget of {_gigabytes(kv_bytes)} does not fit, or holds no block"
            )
        return kv_bytes

    def resolve(self, config: EngineConfig) -> EngineConfig:
        """The settings with the step tokens that an engine on this device takes in place of "auto"."""
        if self.device.name == "cpu":
            return config
        return resolve_step_tokens(config, self.device, self.shape, self.free_bytes)

    def corrected(self, speed_ratio: float) -> "Hardware":
        """The hardware whose steps take `speed_ratio` times as long, see `find_speed_ratio`."""
        if speed_ratio == 1.0:
            return self
        title = f"{self.device.title}, {speed_ratio:.2f} times its simulated time as in the newest nights"
        device = _scale(self.device, title, 1 / speed_ratio)
        return replace(self, device=replace(device, host_s_per_layer=self.device.host_s_per_layer * speed_ratio))

    def simulate(
        self,
        requests: Sequence[Request],
        groups: Sequence[PrefixGroup],
        config: EngineConfig,
        kv_bytes: int,
    ) -> SimulationSummary:
        """Simulate one engine on this device with these groups and answers of expected length; `ConfigError` if the
        device has no rate for the number format.

        Args:
            groups: their members' request_indices point into `requests`.
            kv_bytes: memory for KV.
        """
        config = self.resolve(config)
        steps = simulate_plan(
            requests,
            groups,
            num_kv_blocks=kv_bytes // self.shape.kv_block_bytes(config),
            config=config,
            roofline=Roofline(self.shape, self.device, self.dtype),
            windows=self.shape.kv_layout(config).windows,
        )
        return summarize_steps(steps)


def check_hardware(name: str) -> None:
    """`ConfigError` if no device of `choose_hardware` is called so."""
    if name.lower() not in (*DEVICES, *_MEASURED):
        raise ConfigError(f"no device {name!r}; there are {', '.join((*DEVICES, *_MEASURED))}")


def choose_hardware(checkpoint: Path, team: EngineTeam, name: str | None = None) -> Hardware:
    """The device called `name`, with the model of a checkpoint folder on it.

    Args:
        team: whose engines on a host share the rates of a CPU; GPUs are not shared.
        name: of `DEVICES`, or "cpu", "cuda" or "auto" for a device of this machine; None for that of the team.
    Raises:
        CapacityError: the KV budget is below two blocks, see `check_kv_budget`.
        ConfigError: no such device, no GPU here, or the device has no rate for the number format.
        ModelError: config.json cannot be read, or the model's cost is not known.
    """
    config = team.engine
    if name is None:
        name = config.device.partition(":")[0]
    check_hardware(name)
    kind, values = name.lower(), read_json(checkpoint / "config.json")
    if kind in DEVICES:
        device = DEVICES[kind]
        dtype = cast(Dtype, next(iter(device.peak_flops))) if config.dtype == "auto" else config.dtype
        shape = ModelShape.from_config(values, dtype=dtype)
    else:
        from engine.simulation.device_probe import probe_device  # needs torch; devices of the table do not

        here = resolve_device(kind)
        quantized_bytes, computed = _quantized_bytes(checkpoint, config, here)
        dtype = computed or dtype_name(find_dtype(config.dtype, here))
        shape = replace(ModelShape.from_config(values, dtype=dtype), quantized_bytes=quantized_bytes)
        device = probe_device(here, shape, dtype)
        if device.name == "cpu" and team.num_on_host > 1:  # its memory is not divided: the engine settings do that
            device = _scale(device, f"{device.title}, divided by {team.num_on_host} engines", 1 / team.num_on_host)
    if (size := config.tensor_parallel_size) > 1 and device.name != "cpu":  # communication is not counted
        device = replace(_scale(device, f"{size} of {device.title}", size), memory_bytes=device.memory_bytes * size)
    device.flops_per_second(dtype)  # raises if there is none
    check_kv_budget(replace(config, dtype=dtype), checkpoint)
    return Hardware(device=device, dtype=dtype, shape=shape)


def _quantized_bytes(checkpoint: Path, config: EngineConfig, device: "torch.device") -> "tuple[float, Dtype | None]":
    """If the engine keeps the checkpoint's weights quantized: average bytes of a weight, and what it computes in."""
    if config.dtype not in ("auto", "quantized") or not is_quantized(checkpoint):
        return 0.0, None
    from engine.model.quantized.quantized_model import find_quantized, find_quantized_dtype  # imported only when needed

    weights = find_quantized(checkpoint, config, device)
    return (0.0, None) if weights is None else (weights.bytes_per_weight, dtype_name(find_quantized_dtype()))


def _scale(device: Device, title: str, factor: float) -> Device:
    """The device with its rates multiplied."""
    return replace(
        device,
        title=title,
        peak_flops={dtype: flops * factor for dtype, flops in device.peak_flops.items()},
        peak_bytes_per_second=device.peak_bytes_per_second * factor,
    )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB"
