"""Every kernel and every shipped configuration, compiled for every target without a driver."""

import json
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.kernels import resources
from benchmarks.kernels.cross_compile import FP8, TARGETS, compile_attention
from engine.kernels.triton.tuned import load_tuned

ROOT = Path(__file__).parents[3]
RUNS = [
    *((architecture, "shipped") for architecture in TARGETS),
    *((architecture, every) for every in ("default", "variants") for architecture in ("sm_90", "gfx90a")),
    *((architecture, "fp8") for architecture in FP8),
]


@pytest.fixture(scope="module")
def reports() -> dict[tuple[str, str], list[dict]]:
    """What is read from the machine code.

    A kernel that another run has compiled comes from Triton's cache, and so do all if BATCHLOOM_TESTS_CACHE is kept.
    """
    return {run: [asdict(found) for found in resources.report(*run)] for run in RUNS}


@pytest.mark.slow
def test_the_program_prints_and_writes_what_is_read(reports: dict[tuple[str, str], list[dict]], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "benchmarks.kernels.resources", "--architecture", "sm_90"]
    done = subprocess.run(
        [*command, "--json", tmp_path / "found.json"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == reports["sm_90", "shipped"]
    assert [line.split("  ")[-1] for line in done.stdout.splitlines()] == ["fits"] * len(found)


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids="-".join)
def test_fits_without_spills(reports: dict[tuple[str, str], list[dict]], run: tuple[str, str]) -> None:
    architecture, every = run
    found = {report["kernel"]: resources.Resources(**report) for report in reports[run]}
    if every == "fp8":
        kernels = {"add_rms_norm fp8", "rotate_and_write_kv fp8", "quantize_rows", "quantized_swiglu", "copy_kv"}
        launches = {f"attention fp8 {name}" for name in ("decode", "grouped", "mixed")}
        assert found.keys() == launches | kernels
        assert all(found[name].matrix_instructions for name in launches)
    elif every != "variants":
        configuration = architecture if every == "shipped" else every
        others = {"merge", "add_rms_norm", "rotate_and_write_kv", "swiglu", "draw"}
        assert found.keys() == {name for name, *_ in resources.shipped_launches(configuration)} | others
    for name, report in found.items():
        assert report.violations() == [], name
        assert report.registers > 0
        # A shipped launch keeps AMD's scalar registers apart too; a variant may park a few in lanes of a vector one.
        assert report.sgpr_lanes <= (32 if every == "variants" else 0), name


@pytest.mark.slow
@pytest.mark.parametrize("architecture", TARGETS)
def test_configurations_count_the_programs_that_fit(
    reports: dict[tuple[str, str], list[dict]], architecture: str
) -> None:
    fitting = {report["kernel"]: report["programs_per_processor"] for report in reports[architecture, "shipped"]}
    for name, _, _, launch in resources.shipped_launches(architecture):
        # Other compiler versions allocate registers a little differently.
        assert launch.programs_per_processor <= fitting[name] + 1, name


@pytest.mark.slow
def test_products_run_on_matrix_units(reports: dict[tuple[str, str], list[dict]]) -> None:
    for architecture, unit in (
        ("sm_80", "mma.sync"),
        ("sm_90", "mma.sync"),
        ("gfx90a", "v_mfma"),
        ("gfx942", "v_mfma"),
    ):
        for report in reports[architecture, "shipped"]:
            if "16-bit" in report["kernel"]:
                assert report["matrix_instructions"][unit] > 0, report["kernel"]
    for report in reports["sm_90", "shipped"]:
        if "16-bit" in report["kernel"] and report["kernel"].endswith(("mixed", "grouped")):
            assert report["matrix_instructions"]["wgmma.mma_async"] > 0, report["kernel"]


class TestMergeInsideTheLaunch:
    """What the interpreter cannot show: that partial results are there before they are counted, on real memory."""

    @pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
    def test_nvidia_counts_behind_a_barrier(self, architecture: str) -> None:
        steps = self._steps(architecture, "ptx", r"st\.global|bar\.sync|barrier\.sync|atom\.\S+|ld\.global\.cg")
        count = next(i for i, step in enumerate(steps) if step.startswith("atom"))
        assert re.match(r"atom\.(global\.gpu\.acq_rel|acq_rel\.gpu\.global)\.add", steps[count])
        assert "bar" in steps[count - 1]
        assert "st.global" in "".join(steps[:count])
        behind = steps[count + 1 :]
        assert "bar" in " ".join(behind[: behind.index("ld.global.cg")])

    @pytest.mark.parametrize("architecture", ["gfx90a", "gfx942"])
    def test_amd_waits_for_every_wave_s_stores(self, architecture: str) -> None:
        pattern = r"global_store\S*|s_barrier|s_waitcnt vmcnt\(0\)|global_atomic_add|buffer_(?:wbl2|inv|wbinvl1)\S*"
        steps = self._steps(architecture, "amdgcn", pattern)
        count = steps.index("global_atomic_add")
        last_store = max(i for i in range(count) if steps[i].startswith("global_store"))
        barrier = last_store + 1 + steps[last_store + 1 :].index("s_barrier")
        assert barrier < count
        assert "s_waitcnt vmcnt(0)" in steps[last_store:barrier]
        behind = steps[count + 1 :]
        assert any(step.startswith("buffer_") for step in behind[: behind.index("s_barrier")])

    @staticmethod
    def _steps(architecture: str, kind: str, pattern: str) -> list[str]:
        launch = load_tuned(architecture, element_bits=16, head_dim=64).launches[0]
        return re.findall(pattern, compile_attention(architecture, launch, head_dim=64).asm[kind])


def test_the_default_configuration_fits_the_smallest_memory() -> None:
    for bits in (16, 32):
        for head_dim in (64, 128, 256):
            for launch in load_tuned("default", element_bits=bits, head_dim=head_dim).launches:
                step_bytes = 2 * launch.narrow.tokens * head_dim * bits // 8
                assert step_bytes * max(launch.num_stages - 1, 1) <= 64 * 1024
