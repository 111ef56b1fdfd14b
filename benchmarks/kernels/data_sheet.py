"""Data sheets of devices, and the costs of tiles estimated from them."""

from dataclasses import dataclass, replace

from engine.kernels.triton.tuned import Launch, TileShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """A vendor's figures of a device, which are not measured.

    Attributes:
        memory_gb_s, l2_gb_s: bandwidths; if L2's is not stated, 2.5 times the memory's.
        matrix_tflops: by element bits, dense.
    """

    device: str
    num_processors: int
    memory_gb_s: float
    l2_gb_s: float
    matrix_tflops: dict[int, float]


DATA_SHEETS = {
    "sm_80": DataSheet(
        device="A100 80GB SXM", num_processors=108, memory_gb_s=2039, l2_gb_s=5100, matrix_tflops={16: 312, 32: 19.5}
    ),
    "sm_90": DataSheet(
        device="H200 SXM", num_processors=132, memory_gb_s=4800, l2_gb_s=10000, matrix_tflops={16: 989, 32: 67}
    ),
    "gfx90a": DataSheet(
        device="MI250X, one of its two dies", num_processors=110, memory_gb_s=1638, l2_gb_s=4100,
        matrix_tflops={16: 191, 32: 47},
    ),
    "gfx942": DataSheet(
        device="MI300X", num_processors=304, memory_gb_s=5300, l2_gb_s=13000, matrix_tflops={16: 1307, 32: 163}
    ),
}  # fmt: skip


def in_flight_bytes(launch: Launch, bits: int, head_dim: int) -> int:
    """KV that a program of narrow tiles has under way at once."""
    return max(launch.num_stages - 1, 1) * 2 * launch.narrow.tokens * head_dim * bits // 8


MEMORY_SHARE = 0.8
"""Share of the stated bandwidth that a launch reaches."""

START_US = 9.5
"""Time of a launch on an H200."""


def kilotokens_us(sheet: DataSheet, bits: int, head_dim: int) -> tuple[float, float]:
    """Time to read 1,000 KV tokens of one KV head, from memory and from L2."""
    num_bytes = 1000 * 2 * head_dim * bits // 8
    memory_us, l2_us = num_bytes / (sheet.memory_gb_s * MEMORY_SHARE * 1e3), num_bytes / (sheet.l2_gb_s * 1e3)
    return round(memory_us, 5), round(l2_us, 5)


def estimate_costs(launch: Launch, sheet: DataSheet, bits: int, head_dim: int) -> Launch:
    """Fill in the costs of tiles, if each slot has an equal share of L2's bandwidth and half of the matrix rate."""
    num_slots = sheet.num_processors * launch.programs_per_processor

    def costs(shape: TileShape) -> TileShape:
        kilotoken_bytes = 1000 * 2 * head_dim * bits // 8
        kilotoken_flops = 1000 * 4 * head_dim * shape.rows
        # A step of the loop waits at its barriers for a fixed time.
        l2_us = 0.45 * 1000 / shape.tokens + kilotoken_bytes / (sheet.l2_gb_s * 1e3 / num_slots)
        # A load arrives about a microsecond after its request, even if the memory is idle.
        waiting_us = kilotoken_bytes / in_flight_bytes(launch, bits, head_dim)
        matrix_us = kilotoken_flops / (sheet.matrix_tflops[bits] * 0.5 * 1e6 / num_slots)
        # A partial is written and read back through L2, in fp32, after an atomic's round trip.
        partial_us = 2.5 + 2 * 4 * shape.rows * head_dim / (sheet.l2_gb_s * 1e3 / num_slots)
        return replace(
            shape, tile_us=2.5 + shape.rows / 16, kilotoken_us=round(max(l2_us, waiting_us, matrix_us), 3),
            partial_us=round(partial_us, 3),
        )  # fmt: skip

    return replace(launch, narrow=costs(launch.narrow), wide=costs(launch.wide) if launch.wide else None)
