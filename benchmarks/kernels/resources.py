"""Shared memory, registers and spills of the kernels on each architecture, compiled without a GPU driver.

    python -m benchmarks.kernels.resources [--architecture sm_90 ...] [--every {shipped,default,variants,fp8}]
                                           [--json FILE]

NVIDIA's figures are read from the cubin with Triton's cuobjdump, AMD's from the code object's metadata. Spilled
registers show as a stack frame (NVIDIA) or as private segment and vgpr spills (AMD). AMD's compiler may also keep
scalar registers in unused lanes of vector registers (sgpr_lanes), which uses no memory. Kernels in Triton's cache
(TRITON_CACHE_DIR) are not compiled again.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

from benchmarks.kernels.cross_compile import FP8, TARGETS, compile_attention, compile_named
from engine.kernels import cdiv
from engine.kernels.triton.tuned import CONFIG_FOLDER, Launch, load_tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessorLimits:
    """The resources of one processor (SM or CU); a program may use all of program_shared_bytes."""

    program_shared_bytes: int
    shared_bytes: int
    reserved_shared_bytes: int
    registers: int
    warps: int


LIMITS = {
    "sm_80": ProcessorLimits(
        program_shared_bytes=163 * 1024, shared_bytes=164 * 1024, reserved_shared_bytes=1024, registers=65536, warps=64
    ),
    "sm_90": ProcessorLimits(
        program_shared_bytes=227 * 1024, shared_bytes=228 * 1024, reserved_shared_bytes=1024, registers=65536, warps=64
    ),
    # Four SIMDs of 512 vector registers a lane, 64 lanes.
    **dict.fromkeys(
        ("gfx90a", "gfx942"),
        ProcessorLimits(
            program_shared_bytes=64 * 1024,
            shared_bytes=64 * 1024,
            reserved_shared_bytes=0,
            registers=4 * 512 * 64,
            warps=32,
        ),
    ),
}


MOST_SPILLED_BYTES = 0 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) else 24
"""Per thread. Launches are chosen to spill nothing; older versions of Triton spill a few registers in some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The resources of one compiled kernel.

    Attributes:
        registers: per thread (on AMD vector registers, accumulation registers included).
        spilled_bytes: of memory per thread that holds spilled registers.
        sgpr_lanes: AMD only: scalar registers kept in lanes of vector ones.
        programs_per_processor: that fit at once.
        matrix_instructions: by name, how often they occur in the code.
    """

    kernel: str
    architecture: str
    shared_bytes: int
    registers: int
    spilled_bytes: int
    sgpr_lanes: int
    programs_per_processor: int
    matrix_instructions: Mapping[str, int]

    def violations(self) -> list[str]:
        """Which resources exceed the architecture, in words."""
        limits = LIMITS[self.architecture]
        found = []
        if self.shared_bytes > limits.program_shared_bytes:
            found.append(f"{self.shared_bytes} bytes of shared memory, limit {limits.program_shared_bytes}")
        if self.spilled_bytes > MOST_SPILLED_BYTES:
            found.append(f"{self.spilled_bytes} bytes spilled per thread")
        if not self.programs_per_processor:
            found.append("does not fit a processor")
        return found


def resources_of(name: str, architecture: str, compiled: Any) -> Resources:
    """Reads a compiled kernel's figures out of its machine code."""
    shared_bytes = int(compiled.metadata.shared)
    num_warps = int(compiled.metadata.num_warps)
    limits = LIMITS[architecture]
    if architecture.startswith("sm_"):
        usage = _cubin_usage(compiled.asm["cubin"])
        registers, spilled_bytes, sgpr_lanes = usage["REG"], usage["STACK"] + usage["LOCAL"], 0
        registers_of_program = cdiv(registers, 8) * 8 * 32 * num_warps
        text, patterns = compiled.asm["ptx"], (r"wgmma\.mma_async", r"mma\.sync", r"cp\.async\.c[ag]")
    else:
        text = compiled.asm["amdgcn"]
        registers, sgpr_lanes = _amd_figure(text, "vgpr_count"), _amd_figure(text, "sgpr_spill_count")
        spilled_bytes = _amd_figure(text, "private_segment_fixed_size") + 4 * _amd_figure(text, "vgpr_spill_count")
        registers_of_program = cdiv(registers, 8) * 8 * 64 * num_warps
        patterns = (r"v_mfma",)
    by_shared = limits.shared_bytes // max(shared_bytes + limits.reserved_shared_bytes, 1)
    return Resources(
        kernel=name,
        architecture=architecture,
        shared_bytes=shared_bytes,
        registers=registers,
        spilled_bytes=spilled_bytes,
        sgpr_lanes=sgpr_lanes,
        programs_per_processor=min(by_shared, limits.registers // registers_of_program, limits.warps // num_warps),
        matrix_instructions={pattern.replace("\\", ""): len(re.findall(pattern, text)) for pattern in patterns},
    )


def _cubin_usage(cubin: bytes) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", report)}


def _amd_figure(text: str, name: str) -> int:
    found = re.search(rf"\.{name}:\s+(\d+)", text)
    if found is None:
        raise ValueError(f"the code object's metadata has no {name}")
    return int(found.group(1))


def shipped_launches(configuration: str) -> Iterator[tuple[str, int, int, Launch]]:
    """Every launch of a shipped configuration: its name, element bits, head dim, the launch."""
    document = json.loads((CONFIG_FOLDER / f"{configuration}.json").read_text())
    for entry in document["entries"]:
        bits, head_dim = entry["element_bits"], entry["head_dim"]
        for launch in load_tuned(configuration, element_bits=bits, head_dim=head_dim).launches:
            yield f"attention {bits}-bit {head_dim} {launch.name}", bits, head_dim, launch


def report(architecture: str, every: str) -> Iterator[Resources]:
    """Compile kernels for an architecture and read their resources: the launches shipped for it, those of the default
    configuration, variants of one launch by flags, head counts and block sizes, or the kernels of 8-bit models."""
    if every == "fp8":
        yield from _report_fp8(architecture)
        return
    if every != "variants":
        configuration = architecture if every == "shipped" else every
        for name, bits, head_dim, launch in shipped_launches(configuration):
            element = "bf16" if bits == 16 else "fp32"
            compiled = compile_attention(architecture, launch, element=element, head_dim=head_dim)
            yield resources_of(name, architecture, compiled)
        for name in ("merge", "add_rms_norm", "rotate_and_write_kv", "swiglu", "draw"):
            yield resources_of(name, architecture, compile_named(name, architecture))
        return
    decode, *_, mixed = load_tuned(architecture, element_bits=16, head_dim=128).launches
    odd = {"element": "fp16", "head_dim": 96, "group_size": 7, "block_size": 64, "has_sinks": True}
    masked = {"has_window": True, "has_cap": True}
    for name, launch, variant in (
        ("window, soft cap, sinks, fp16, head dim 96, group of 7, block of 64", mixed, odd | masked),
        ("window, soft cap, block of 128", decode, masked | {"block_size": 128}),
        ("group of 16, block of 32", decode, {"group_size": 16, "block_size": 32}),
        ("partials only, group of 1, block of 128", mixed, {"is_merging": False, "group_size": 1, "block_size": 128}),
    ):
        yield resources_of(name, architecture, compile_attention(architecture, launch, **{"head_dim": 128} | variant))
    for size, element in ((576, "bf16"), (8192, "bf16"), (16384, "fp32")):
        compiled = compile_named("add_rms_norm", architecture, size=size, has_rows=True, element=element)
        yield resources_of(f"add_rms_norm of rows, {size}, {element}", architecture, compiled)
    for head_dim, element in ((96, "fp16"), (256, "fp32")):
        name = "rotate_and_write_kv"
        compiled = compile_named(name, architecture, head_dim=head_dim, has_norms=False, element=element)
        yield resources_of(f"{name}, {head_dim}, {element}", architecture, compiled)
    compiled = compile_named("swiglu", architecture, inner_size=8960, element="fp32")
    yield resources_of("swiglu, 8960, fp32", architecture, compiled)


def _report_fp8(architecture: str) -> Iterator[Resources]:
    """The kernels of a model in 8 bits: attention with what is shipped for 16 bits."""
    for launch in load_tuned(architecture, element_bits=16, head_dim=128).for_8_bit_kv().launches:
        compiled = compile_attention(architecture, launch, head_dim=128, kv=FP8[architecture][0])
        yield resources_of(f"attention fp8 {launch.name}", architecture, compiled)
    for name in ("add_rms_norm fp8", "rotate_and_write_kv fp8", "quantize_rows", "quantized_swiglu", "copy_kv"):
        compiled = compile_named(name.removesuffix(" fp8"), architecture, is_fp8=True)
        yield resources_of(name, architecture, compiled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", action="append", choices=sorted(TARGETS))
    parser.add_argument("--every", choices=("shipped", "default", "variants", "fp8"), default="shipped")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for architecture in arguments.architecture or TARGETS:
        for resources in report(architecture, arguments.every):
            found.append(resources)
            broken = "; ".join(resources.violations()) or "fits"
            print(
                f"{architecture:8} {resources.kernel:36} shared {resources.shared_bytes:6}  registers "
                f"{resources.registers:3}  spilled {resources.spilled_bytes}  programs/processor "
                f"{resources.programs_per_processor}  {broken}",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(resources) for resources in found], indent=2) + "\n")
    return int(any(resources.violations() for resources in found))


if __name__ == "__main__":
    sys.exit(main())
