"""Attention kernels on the grid of BatchLLM's Fig. 8: compared with float64, then timed.

Grid: shared prefix of 256, 1,024, 4,096 tokens; own part of 128, 512, 2,048; 4, 16 or all requests per prefix; 32 or
256 decode requests, or 256 decode requests with 7 prefill chunks of 256 tokens beside them; heads of Llama-3-8B (32/8
of 128) and Qwen2-7B (28/4 of 128); bf16, blocks of 16 tokens at random places.

Compared: fused (ours), relay (three launches), plain paged, torch's SDPA (each request's KV gathered beforehand, not
timed), FlexAttention (one packed KV, a block mask that shares prefixes), and FlashInfer's cascade if it is installed.
Times are of CUDA graphs, without the host's time between launches; implementations that cannot be captured are listed
under "not_captured". Reported as well: RelayAttention's Eq. 10, and the shares of bandwidth and of matrix rate,
relative to a copy and a matrix product in the same run.

Every implementation must first agree with float64 on every case; one that does not, or fails, gets no time, and where
it is one of ours the case gets no figures. On a GPU the grid is measured by

    python -m benchmarks.first_light --stages attention flex --out FOLDER

This program only compares with float64, on small cases that take every kind of tile, on any machine (without a GPU with
TRITON_INTERPRET=1):

    python -m benchmarks.kernels.attention [--cases PATTERN] [--only NAME ...]
"""

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from fnmatch import fnmatchcase
from itertools import chain
from statistics import geometric_mean
from typing import Any, TypeVar

import torch

from benchmarks.kernels.attention_implementations import NAMES, OURS, QUICK, Attend, Prepare, implementations
from benchmarks.kernels.attention_step import Case, Step, check_cases
from benchmarks.kernels.gpu import Ceilings, DeviceTime, device_time, error_of, in_one_line
from benchmarks.kernels.relay_model import equation_10

T = TypeVar("T")


def gated(
    step: Step, then: Callable[[Attend], T], names: Collection[str], others: Iterable[tuple[str, Prepare]] = ()
) -> Iterator[tuple[str, T | str]]:
    """The result of `then` for each named implementation that agrees with float64, else why it has no time.

    Args:
        step: the case's tensors.
        then: called with the function that computes the step's attention.
        names: of implementations.
        others: further ones; ours have one of our names before a comma.
    Raises:
        SystemExit: one of ours is wrong.
        Exception: one of ours fails.
    """
    expected = step.expected()
    for name, prepare in chain(implementations(step, names), others):
        is_ours = name.split(",")[0] in OURS
        try:
            attend = prepare()
            error, is_right = error_of(attend(), expected)
            found = then(attend) if is_right else f"no time: differs from float64 by {error:.3%}"
        except Exception as failure:
            if is_ours:
                failure.add_note(f"{name} on {step.case.name}")
                raise
            yield name, f"no time: {in_one_line(failure)}"
            continue
        if not is_right and is_ours:
            wrong = f"{name} is wrong by {error:.3%} on {step.case.name}"
            raise SystemExit(f"benchmarks.kernels.attention: {wrong}: no figures")
        yield name, found


def measure(case: Case, device: torch.device, ceilings: Ceilings) -> dict[str, Any]:
    """The times of all implementations but FlexAttention, and ratios of them, as JSON types.

    Args:
        case: the point of the grid.
        device: a GPU.
        ceilings: 100% of the shares.
    """
    step = Step.make(case, device)
    found = dict(gated(step, device_time, QUICK))
    timed = {name: took for name, took in found.items() if isinstance(took, DeviceTime)}
    fused_us = timed["fused"].us
    return asdict(case) | {
        "name": case.name,
        "us": found | {name: took.us for name, took in timed.items()},
        "not_captured": {name: took.not_captured for name, took in timed.items() if took.not_captured},
        "speedup_of_fused": {name: took.us / fused_us for name, took in timed.items()},
        "relay_equation_10": round(equation_10(case.num_members, case.prefix_len, case.own_len), 3),
        "share_of_bandwidth": round(step.num_bytes / fused_us / 1e3 / ceilings.memory_gb_s, 3),
        "share_of_matrix_rate": round(step.num_flops / fused_us / 1e6 / ceilings.matrix_tflops, 3),
        "ceilings": asdict(ceilings),
    }


def summary(cases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Geometric means of the gains of fused, and its worst case against plain paged attention."""
    names = sorted({name for case in cases for name in case["speedup_of_fused"]} - {"fused"})
    means = {}
    for name in names:
        mean = geometric_mean(case["speedup_of_fused"][name] for case in cases if name in case["speedup_of_fused"])
        means[f"geometric mean over {name}"] = float(f"{mean:.3g}")
    means["worst over paged"] = min(case["speedup_of_fused"]["paged"] for case in cases)
    return means


def check(cases: Sequence[Case], names: Collection[str]) -> None:
    """Print which of the named implementations agree with float64, on a GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for case in cases:
        for name, reason in gated(Step.make(case, device), lambda _: "", names):
            print(f"{name}: {case.name}: {reason or 'agrees with float64'}", flush=True)


def main(command_line: Sequence[str] | None = None) -> int:
    """Compares as `command_line` says (the process's own if None); returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="*", metavar="PATTERN", help='by name: "*prefix-40 *"')
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help=", ".join(NAMES))
    arguments = parser.parse_args(command_line)
    torch.manual_seed(0)
    cases = list(check_cases())
    wanted = [case for case in cases if fnmatchcase(case.name, arguments.cases)]
    if not wanted:
        parser.error(f"--cases {arguments.cases!r} fits none; the first is {cases[0].name!r}")
    check(wanted, arguments.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
