"""Attention kernels on a GPU, on the grid of BatchLLM's Fig. 8:  python -m benchmarks.attention [--out FILE]

Grid: shared prefix of 256, 1,024, 4,096 tokens; own part of 128, 512, 2,048; 4, 16 or all requests per prefix; 32 or
256 decode requests, or 256 decode requests with 7 prefill chunks of 256 tokens beside them; heads of Llama-3-8B (32/8
of 128) and Qwen2-7B (28/4 of 128); bf16, blocks of 16 tokens at random places.

Compared: fused (ours), relay (three launches), plain paged, torch's SDPA (each request's KV gathered beforehand, free
of charge) and FlexAttention (one packed KV, a block mask that shares prefixes), FlashInfer's cascade where it is
installed. Beside each: RelayAttention's Eq. 10, and the share of the bandwidth and of the matrix rate that a copy and a
product reach in the same run.

Every implementation must first agree with float64 on every case; one that does not gets no time, and one of ours that
does not ends the run. Without a GPU nothing is measured, and the program says so; `--check` runs the comparison alone,
small, on any machine (with TRITON_INTERPRET=1 where there is no GPU).
"""

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.attention_implementations import Attend, implementations
from benchmarks.attention_step import Case, Step, grid
from benchmarks.gpu import Ceilings, GpuRun, device_time, measure_ceilings, require_gpu
from benchmarks.relay_model import equation_10
from benchmarks.result_file import write_result
from engine.kernels.reference import paged_attention_ref

OURS = ("fused", "relay", "paged")


def gated(step: Step) -> Iterator[tuple[str, Attend | str]]:
    """Each implementation that agrees with float64; of one that does not, why there is no time.

    Raises:
        SystemExit: one of ours is wrong.
    """
    expected = paged_attention_ref(
        step.query.double(), step.k_cache.double(), step.v_cache.double(), step.batch, scale=step.scale
    )
    for name, attend in implementations(step):
        error = float((attend().double() - expected).abs().max())
        if error < GpuRun.tolerance(torch.bfloat16):
            yield name, attend
        elif name in OURS:
            raise SystemExit(f"benchmarks.attention: {name} is wrong by {error} on {step.case}: no figures")
        else:
            yield name, f"no time: differs from float64 by {error}"


def measure(case: Case, run: GpuRun, ceilings: Ceilings) -> dict[str, Any]:
    step = Step.make(case, run.device)
    times: dict[str, float | str] = {
        name: attend if isinstance(attend, str) else device_time(attend).us for name, attend in gated(step)
    }
    fused_us = float(times["fused"])
    return asdict(case) | {
        "us": times,
        "speedup_of_fused": {n: round(us / fused_us, 3) for n, us in times.items() if not isinstance(us, str)},
        "relay_equation_10": round(equation_10(case.num_members, case.prefix_len, case.own_len), 3),
        "share_of_bandwidth": round(step.num_bytes / fused_us / 1e3 / ceilings.memory_gb_s, 3),
        "share_of_matrix_rate": round(step.num_flops / fused_us / 1e6 / ceilings.matrix_tflops, 3),
    }


def summary(cases: list[Mapping[str, Any]]) -> dict[str, float]:
    """Geometric means of what fused gains, and its worst case against plain paged attention."""
    names = sorted({name for case in cases for name in case["speedup_of_fused"]} - {"fused"})
    means = {}
    for name in names:
        logs = [math.log(case["speedup_of_fused"][name]) for case in cases if name in case["speedup_of_fused"]]
        means[f"geometric mean over {name}"] = round(math.exp(sum(logs) / len(logs)), 3)
    means["worst over paged"] = min(case["speedup_of_fused"]["paged"] for case in cases)
    return means


def check() -> int:
    """The gate alone, on small cases, on whatever device there is."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for num_prefill in (0, 2):
        case = Case(
            model="Qwen2-7B",
            prefix_len=40,
            own_len=9,
            num_members=2,
            num_decode=4,
            num_prefill=num_prefill,
            prefill_rows=5,
        )
        for name, found in gated(Step.make(case, device)):
            if isinstance(found, str):
                print(f"{name}: {found}")
                return 1
            print(f"{name} agrees with float64 on {case}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention.json")
    parser.add_argument("--check", action="store_true", help="compare only, small, on any machine")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    if arguments.check:
        return check()
    run = require_gpu("benchmarks.attention")
    ceilings = measure_ceilings(run)
    cases = []
    for case in grid():
        cases.append(measure(case, run, ceilings))
        print(json.dumps(cases[-1]), flush=True)
    document = {
        "command": "python -m benchmarks.attention", "hardware": run.hardware, "versions": run.versions,
        "commit": run.commit,
        "ceilings": asdict(ceilings), "summary": summary(cases), "cases": cases,
    }  # fmt: skip
    write_result(arguments.out, document)
    print(json.dumps(document["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
