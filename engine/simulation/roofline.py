"""What a step costs by the roofline model: operations or bytes, whichever takes longer, and issuing the work.

Operations are those of the linear layers and of attention, bytes those of the weights and of the KV that is read and
written; a shared prefix is read once for all that attend to it (RelayAttention section 3.4 counts memory the same way).
Issuing takes the host an assumed time a layer. Sampling and the scheduler itself are not in the model.
"""

from dataclasses import dataclass

from engine.model.model_shape import ModelShape
from engine.simulation.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Counts of one step.

    Attributes:
        num_rows: tokens that go through the layers; as many KV tokens are written.
        num_output_rows: of these, rows that go through the whole output layer.
        num_attention_pairs: (query token, key token) pairs, causal.
        num_kv_tokens_read: KV tokens that attention reads from memory.
    """

    num_rows: int
    num_output_rows: int
    num_attention_pairs: int
    num_kv_tokens_read: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Seconds that one step takes the arithmetic units, the memory, and the host that issues its work.

    Attributes:
        overlaps_host: the host works while the device does; else before.
    """

    compute_s: float
    memory_s: float
    host_s: float
    overlaps_host: bool

    @property
    def seconds(self) -> float:
        """Predicted for the step."""
        device_s = max(self.compute_s, self.memory_s)
        return max(device_s, self.host_s) if self.overlaps_host else device_s + self.host_s


class Roofline:
    """The cost of steps of one model in one number format on one device."""

    __slots__ = ("_bytes_per_second", "_flops_per_second", "_host_s", "_overlaps_host", "_shape")

    def __init__(self, shape: ModelShape, device: Device, dtype: str) -> None:
        """Raises `ConfigError` where the device has no rate for `dtype`."""
        self._shape = shape
        self._flops_per_second = device.flops_per_second(dtype)
        self._bytes_per_second = device.bytes_per_second
        self._host_s = shape.num_layers * device.host_s_per_layer
        self._overlaps_host = device.overlaps_host

    def cost(self, work: StepWork) -> StepCost:
        shape = self._shape
        flops = 2 * (work.num_rows * shape.num_layer_weights + work.num_output_rows * shape.num_head_weights)
        flops += work.num_attention_pairs * shape.flops_per_attention_pair
        num_weights = shape.num_layer_weights + (shape.num_head_weights if work.num_output_rows else 0)
        num_bytes = num_weights * shape.value_bytes
        num_bytes += (work.num_kv_tokens_read + work.num_rows) * shape.kv_bytes_per_token
        return StepCost(
            compute_s=flops / self._flops_per_second,
            memory_s=num_bytes / self._bytes_per_second,
            host_s=self._host_s,
            overlaps_host=self._overlaps_host,
        )
