"""Writes the tuned configuration of an architecture (engine/kernels/configs).

    python -m benchmarks.kernels.tune                     on a GPU: measures it, writes its architecture's file
    python -m benchmarks.kernels.tune --estimate sm_90    anywhere: from data sheets, for architectures not measured;
                                                          "default" fits every target, for devices without a file

A launch ships only if it compiles for the architecture without spills and within its limits (resources.py). On a GPU
every candidate runs steps of known tiles. Of each kind of launch (launch_candidates.py) the fastest ships, with the
costs that explain the times of all shipped launches best (cost_fit.py). A candidate that fails or gives a wrong result
is named and left out. While one is measured, processes on the other cores compile the following ones.

An entry of the file (element bits, head dim) is replaced as soon as it is known, the others stay; so the work can be
done in pieces with --bits and --head-dim. --seconds ends the search in time, with the best launch so far.
"""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict
from itertools import chain, zip_longest
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any

import torch

from benchmarks.kernels.compiled_ahead import compiled_ahead
from benchmarks.kernels.cost_fit import DeviceCosts, MeasuredStep, fit_costs
from benchmarks.kernels.cross_compile import TARGETS
from benchmarks.kernels.data_sheet import DATA_SHEETS, START_US, estimate_costs, kilotokens_us
from benchmarks.kernels.gpu import GpuRun, in_one_line, require_gpu
from benchmarks.kernels.launch_candidates import candidates, described, fitted
from benchmarks.kernels.tuning_steps import TuningBench
from benchmarks.measuring.result_file import write_result
from engine.kernels.triton.triton_attention import architecture_of
from engine.kernels.triton.tuned import CONFIG_FOLDER, Launch

DTYPES = {16: torch.bfloat16, 32: torch.float32}
HEAD_DIMS = (64, 128, 256)


def estimate(architecture: str, bits: int, head_dim: int) -> dict[str, Any]:
    """An entry from a data sheet: the first fitting candidates, each tile at its share of the device's rates."""
    sheet = DATA_SHEETS.get(architecture, DATA_SHEETS["sm_80"])
    launches: dict[str, Launch] = {}
    for candidate in candidates(architecture, bits, head_dim):
        if candidate.name in launches:
            continue
        launch = fitted(candidate, architecture, bits, head_dim)
        # With one program per processor nothing would run while a program starts.
        if launch is not None and (launch.name == "mixed" or launch.programs_per_processor > 1):
            launches[launch.name] = estimate_costs(launch, sheet, bits, head_dim)
            print(f"{architecture} {bits}-bit {head_dim}: {launches[launch.name]}", flush=True)
    origin = f"estimated from the data sheet of {sheet.device}; not measured"
    return entry(
        bits, head_dim, origin, sheet.num_processors, (START_US, *kilotokens_us(sheet, bits, head_dim)),
        [launches[name] for name in sorted(launches)],
    )  # fmt: skip


class Search:
    """The best launches for one element size and head dim on the GPU at hand.

    Attributes:
        best: by name, a launch with estimated costs, and its steps.
        left_out: the candidates that failed, and why.
        untried: the candidates for which there was no time.
    """

    def __init__(self, run: GpuRun, architecture: str, bits: int, head_dim: int) -> None:
        self.best: dict[str, tuple[Launch, list[MeasuredStep]]] = {}
        self.left_out: list[str] = []
        self.untried = list(alternating(candidates(architecture, bits, head_dim)))
        self._num_candidates = len(self.untried)
        self._run = run
        self._architecture = architecture
        self._bits = bits
        self._head_dim = head_dim
        self._bench = TuningBench(run, DTYPES[bits], head_dim)

    @property
    def text(self) -> str:
        return f"{self._architecture} {self._bits}-bit {self._head_dim}"

    def go_on_until(self, ends: float) -> None:
        """Tries candidates; none begins after `ends` (of `time.monotonic`)."""
        with compiled_ahead(self.untried, self._architecture, self._bits, self._head_dim) as compiled:
            for future in compiled:
                seconds_left = min(ends - time.monotonic(), TIMEOUT_MAX)
                if seconds_left <= 0 or not wait([future], seconds_left).done:
                    break
                self._try(self.untried.pop(0), future)

    def _try(self, candidate: Launch, compiled: Future[Launch | None]) -> None:
        """Measures a candidate that fits."""
        try:
            launch = compiled.result()
            if launch is None:
                return
            costed = estimate_costs(launch, DATA_SHEETS[self._architecture], self._bits, self._head_dim)
            steps = self._bench.measure(costed)
        except Exception as failure:
            self.left_out.append(f"{self.text} {described(candidate)}: {in_one_line(failure)}")
            print(f"left out: {self.left_out[-1]}", flush=True)
            return
        total_us = sum(step.us for step in steps)
        print(f"{self.text} {total_us:10.1f} us  {described(launch)}", flush=True)
        if launch.name not in self.best or total_us < sum(step.us for step in self.best[launch.name][1]):
            self.best[launch.name] = costed, steps

    def entry(self) -> dict[str, Any] | None:
        """The entry found; None if a kind of launch is missing, other than grouped."""
        wanted = {launch.name for launch in candidates(self._architecture, self._bits, self._head_dim)}
        if not wanted - {"grouped"} <= self.best.keys():
            return None
        origin = f"{measured_on(self._run)}, commit {self._run.commit}"
        if self.untried:
            origin += f"; {self._num_candidates - len(self.untried)} of {self._num_candidates} candidates"
        if self._bench.not_captured:
            origin += f"; times contain the host's: {self._bench.not_captured}"
        sheet = DATA_SHEETS[self._architecture]
        launches, steps = zip(*(self.best[name] for name in sorted(self.best)), strict=True)
        fitted, device = fit_costs(launches, steps, (START_US, *kilotokens_us(sheet, self._bits, self._head_dim)))
        return entry(self._bits, self._head_dim, origin, self._run.num_processors, device, fitted)


def measured_on(run: GpuRun) -> str:
    """The origin of an entry, but for the commit."""
    return f"measured on {run.hardware} with {run.versions}"


def alternating(found: Iterable[Launch]) -> Iterator[Launch]:
    """Launches of each kind in turn, the likeliest first, so that a short search has tried the best ones."""
    by_kind: dict[str, list[Launch]] = {}
    for launch in found:
        by_kind.setdefault(launch.name, []).append(launch)
    return (launch for launch in chain.from_iterable(zip_longest(*by_kind.values())) if launch is not None)


def entry(
    bits: int,
    head_dim: int,
    origin: str,
    num_processors: int,
    device: DeviceCosts,
    launches: Iterable[Launch],
) -> dict[str, Any]:
    """An entry of a configuration file. See `TunedAttention`."""
    start_us, memory_kilotoken_us, l2_kilotoken_us = device
    return {
        "element_bits": bits, "head_dim": head_dim, "origin": origin, "num_processors": num_processors,
        "start_us": start_us, "memory_kilotoken_us": memory_kilotoken_us, "l2_kilotoken_us": l2_kilotoken_us,
        "launches": [asdict(launch) for launch in launches],
    }  # fmt: skip


def keep(found: Mapping[str, Any], architecture: str, folder: Path) -> None:
    """Put an entry into an architecture's file; replaces the entry of the same sizes."""
    file = folder / f"{architecture}.json"
    document = (
        json.loads(file.read_text())
        if file.exists()
        else {
            "architecture": architecture,
            "min_split_tokens": 256,
            "entries": [],
        }
    )
    entries = {(old["element_bits"], old["head_dim"]): old for old in [*document["entries"], found]}
    document["entries"] = [entries[sizes] for sizes in sorted(entries)]
    write_result(file, document)
    print(f"wrote {file}: {found['element_bits']}-bit {found['head_dim']}", flush=True)


def measure(sizes: Sequence[tuple[int, int]], run: GpuRun, folder: Path, seconds: float) -> list[str]:
    """Measure entries one by one, each with its share of the time left; returns the failures."""
    architecture = architecture_of(run.device)
    if architecture not in DATA_SHEETS:
        raise SystemExit(
            f"benchmarks.kernels.tune: no compile target for {architecture}; known: {', '.join(DATA_SHEETS)}"
        )
    ends = time.monotonic() + seconds
    problems = []
    for index, (bits, head_dim) in enumerate(sizes):
        search = Search(run, architecture, bits, head_dim)
        now = time.monotonic()
        search.go_on_until(now + (ends - now) / (len(sizes) - index))
        for candidate in search.untried:
            print(f"not tried: {search.text} {described(candidate)}")
        found = search.entry()
        if found is not None:
            keep(found, architecture, folder)
        else:
            problems.append(f"{search.text} stays as it was: found only {', '.join(search.best) or 'nothing'}")
        problems += search.left_out
    return problems


def main(command_line: Sequence[str] | None = None) -> int:
    """Writes what `command_line` says (the process's own if None); returns the exit code: 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--estimate", choices=[*TARGETS, "default"], help="from the data sheet instead of a measurement"
    )
    parser.add_argument("--folder", type=Path, default=CONFIG_FOLDER)
    parser.add_argument("--bits", type=int, nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--head-dim", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--seconds", type=float, default=math.inf, help="no candidate is begun later than this")
    arguments = parser.parse_args(command_line)
    sizes = [(bits, head_dim) for bits in arguments.bits for head_dim in arguments.head_dim]
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        if arguments.estimate:
            for bits, head_dim in sizes:
                keep(estimate(arguments.estimate, bits, head_dim), arguments.estimate, arguments.folder)
        else:
            problems = measure(sizes, require_gpu("benchmarks.kernels.tune"), arguments.folder, arguments.seconds)
    for problem in problems:
        print(f"benchmarks.kernels.tune: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
