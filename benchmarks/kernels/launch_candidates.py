"""Candidate launches of the attention kernel, and whether one fits an architecture."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.kernels.cross_compile import TARGETS, compile_attention
from benchmarks.kernels.data_sheet import in_flight_bytes
from benchmarks.kernels.resources import LIMITS, resources_of
from engine.kernels.triton.tuned import Launch, TileShape


def candidates(architecture: str, bits: int, head_dim: int) -> Iterator[Launch]:
    """Launches worth trying, the likeliest first.

    Names are "decode" (narrow tiles only), "mixed" (wide tiles for chunks), and "grouped": tiles of 64 rows, of which
    several programs run at once, for the prefixes of small groups (16 requests of 4 query heads a KV head).
    """
    is_small = architecture.startswith("gfx") or architecture == "default"
    # An LDS of 64 KiB holds one step's keys and values; deeper pipelines and longer steps are NVIDIA's.
    stages = (2, 1) if is_small else (3, 2, 4)
    # In fp32, which uses no matrix units on NVIDIA, wide tiles gain nothing.
    wides = [("decode", 0, 4), ("decode", 0, 2)]
    if bits == 16:
        wides += [("grouped", 64, 4), ("mixed", 128, 8), ("mixed", 128, 4), ("mixed", 64, 8)]
    for name, wide_rows, num_warps in wides:
        for tokens in (32, 16) if is_small or bits == 32 else (64, 32, 128):
            # Keys and values of one step stay below 64 KiB.
            if 2 * tokens * head_dim * bits // 8 <= 64 * 1024:
                for num_stages in stages:
                    yield Launch(
                        name=name, narrow=_shape(16, tokens),
                        wide=_shape(wide_rows, tokens) if wide_rows else None, num_warps=num_warps,
                        num_stages=num_stages, programs_per_processor=1, options={},
                    )  # fmt: skip


def _shape(rows: int, tokens: int) -> TileShape:
    return TileShape(rows=rows, tokens=tokens, tile_us=1, kilotoken_us=1, partial_us=1)


def fitted(launch: Launch, architecture: str, bits: int, head_dim: int) -> Launch | None:
    """The launch with the number of programs that fit a processor; None if it exceeds the limits."""
    targets = tuple(TARGETS) if architecture == "default" else (architecture,)
    if any(in_flight_bytes(launch, bits, head_dim) > LIMITS[target].program_shared_bytes for target in targets):
        return None
    num_programs = LIMITS[targets[0]].warps
    for target in targets:
        compiled = compile_attention(target, launch, element="bf16" if bits == 16 else "fp32", head_dim=head_dim)
        resources = resources_of(launch.name, target, compiled)
        if resources.violations() or resources.sgpr_lanes:
            return None
        num_programs = min(num_programs, resources.programs_per_processor)
    return replace(launch, programs_per_processor=num_programs)


def described(launch: Launch) -> str:
    """A text that identifies a candidate."""
    shapes = " and ".join(f"{shape.rows}x{shape.tokens}" for shape in launch.shapes)
    return f"{launch.name} {shapes}, {launch.num_warps} warps, {launch.num_stages} stages"
