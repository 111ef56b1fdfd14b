"""Kernels compiled ahead in other processes are found in Triton's cache by the launches of a search."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

PROGRAM = """
import os
import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.kernels.attention_batches import GroupSize, make_batch
from benchmarks.kernels.compiled_ahead import compiled_ahead
from benchmarks.kernels.launch_candidates import candidates, fitted
from engine.kernels.scoring import Scoring
from engine.kernels.triton import triton_attention
from engine.kernels.triton.device_work import WorkCapacity
from engine.kernels.triton.triton_attention import TritonAttention


class Hopper:
    '''As much of a driver as a launch asks before it compiles.'''

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


parallel, serial = sys.argv[1:]
small = {
    launch.name: launch
    for launch in candidates("sm_90", 16, 64)
    if launch.num_stages == 2 and launch.narrow.tokens == 32
}
wanted = [small["decode"], small["mixed"]]

os.environ["TRITON_CACHE_DIR"] = serial
alone = fitted(small["decode"], "sm_90", 16, 64)
os.environ["TRITON_CACHE_DIR"] = parallel
with compiled_ahead(wanted, "sm_90", 16, 64) as compiled:
    launches = [future.result() for future in compiled]
assert launches[0] == alone
assert None not in launches

driver.set_active(Hopper())
triton_attention.is_interpreted = lambda: True  # a backend on the CPU; its kernels are compiled all the same
run = JITFunction.run
JITFunction.run = lambda self, *arguments, grid, warmup, **options: run(
    self, *arguments, grid=grid, warmup=True, **options
)
batch, num_blocks = make_batch([GroupSize(prefix_len=64, members=[(20, 1)] * 4)], 16)
query = torch.zeros(batch.num_rows, 32, 64, dtype=torch.bfloat16)
cache = torch.zeros(num_blocks, 16, 8, 64, dtype=torch.bfloat16)
backend = TritonAttention(
    num_q_heads=32, num_kv_heads=8, head_dim=64, dtype=torch.bfloat16, block_size=16, device=torch.device("cpu"),
    architecture="sm_90",
)
for launch in launches:
    work_list = backend.plan(batch, (launch,))
    work = backend.reserve(WorkCapacity.of(work_list), launch)
    work.fill(work_list, batch.slot_mapping)
    backend.attend(query, cache, cache, work, Scoring(scale=0.1))
"""


def entries(folder: Path) -> dict[str, bytes]:
    """Machine code by its path in a cache."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("_attention_kernel.cubin")}


@pytest.mark.slow
def test_a_launch_finds_what_was_compiled_ahead(tmp_path: Path) -> None:
    """In parallel or alone, the same kernel is compiled; the launches of two for sm_90 add none."""
    parallel, serial = tmp_path / "parallel", tmp_path / "serial"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(parallel), str(serial)],
        cwd=ROOT, env=os.environ | {"TRITON_CACHE_DIR": str(parallel)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(entries(serial)) == 1
    assert len(entries(parallel)) == 2
    assert entries(serial).items() <= entries(parallel).items()
