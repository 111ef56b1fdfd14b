"""What vendors state of devices, and what tiles should cost by it."""

from dataclasses import dataclass, replace

from engine.kernels.triton.tuned import Launch, TileShape


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSheet:
    """What a vendor states of a device: leads, not measurements.

    Attributes:
        memory_gb_s, l2_gb_s: bandwidths; L2's, where not stated, is taken as 2.5 times the memory's.
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


def estimate_costs(launch: Launch, sheet: DataSheet, bits: int, head_dim: int) -> Launch:
    """Fills in what tiles should cost if every slot had its even share of the bandwidth and of half the matrix rate."""
    num_slots = sheet.num_processors * launch.programs_per_processor

    def costs(shape: TileShape) -> TileShape:
        kilotoken_bytes = 1000 * 2 * head_dim * bits // 8
        kilotoken_flops = 1000 * 4 * head_dim * shape.rows
        # What is under way arrives about a microsecond after it was asked for, however idle the memory is.
        waiting_us = kilotoken_bytes / in_flight_bytes(launch, bits, head_dim)
        memory_us = max(kilotoken_bytes / (sheet.memory_gb_s * 1e3 / num_slots), waiting_us)
        l2_us = max(kilotoken_bytes / (sheet.l2_gb_s * 1e3 / num_slots), waiting_us / 2)
        matrix_us = kilotoken_flops / (sheet.matrix_tflops[bits] * 0.5 * 1e6 / num_slots)
        # A partial is written and read back through L2, in fp32, after an atomic's round trip.
        partial_us = 1.0 + 2 * 4 * shape.rows * head_dim / (sheet.l2_gb_s * 1e3 / num_slots)
        return replace(
            shape, tile_us=2.5, kilotoken_us=round(max(memory_us, matrix_us), 3),
            reread_kilotoken_us=round(max(l2_us, matrix_us), 3), partial_us=round(partial_us, 3),
        )  # fmt: skip

    return replace(launch, narrow=costs(launch.narrow), wide=costs(launch.wide) if launch.wide else None)
