"""Whether each goal is met, missed or not measured, by the stages' files."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.first_light.results import read_parts, read_stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure and its bound.

    Attributes:
        found: None if it was not measured.
        is_least: whether the bound is a lower bound.
    """

    name: str
    found: float | None
    bound: float
    is_least: bool = True

    @property
    def verdict(self) -> str:
        if self.found is None:
            return "not measured"
        is_met = self.found >= self.bound if self.is_least else self.found <= self.bound
        return "met" if is_met else "missed"


def goals(folder: Path) -> Iterator[Goal]:
    """All goals, from the files that exist."""
    gate = read_stage(folder, "gate")
    num_failures = sum("failure" in part for part in gate.get("parts", {}).values())
    is_known = gate.get("status") in ("done", "failed")
    yield Goal(name="failures of the gate", found=num_failures if is_known else None, bound=0, is_least=False)
    cases = [case for name, case in read_parts(folder, "attention").items() if name != "ceilings"]
    shared = [case for case in cases if case["num_members"] > 1]
    over_relay = [case["speedup_of_fused"]["relay"] for case in shared]
    mean = statistics.geometric_mean(over_relay) if over_relay else None
    yield Goal(name="fused over relay, geometric mean of the grid", found=mean, bound=1.3)
    over_paged = min((case["speedup_of_fused"]["paged"] for case in cases), default=None)
    yield Goal(name="fused over paged, worst case", found=over_paged, bound=0.97)
    for name, decodes, bound in (
        ("share of copy bandwidth, shared decode, median", [case for case in shared if not case["num_prefill"]], 0.65),
        (
            "share of copy bandwidth, long plain decode, median",
            [case for case in cases if case["num_members"] == 1],
            0.8,
        ),
    ):
        yield Goal(name=name, found=_median(case["share_of_bandwidth"] for case in decodes), bound=bound)
    batches = read_parts(folder, "batches")
    prefill = batches.get("ours: prefill", {}).get("share_of_ceiling")
    yield Goal(name="share of matrix ceiling, 8B bf16 prefill", found=prefill, bound=0.62)
    for workload in ("case-1", "case-2"):
        for other, part, bound in (("server", workload, 1.5), ("transformers", f"{workload}-short", 2.0)):
            yield Goal(
                name=f"{part} over {other}", found=_speedup(batches, f"ours: {part}", f"{other}: {part}"), bound=bound
            )
    idle = batches.get("profile: case-1", {}).get("idle_share")
    yield Goal(name="device idle, case 1", found=idle, bound=0.05, is_least=False)
    host_ms = read_parts(folder, "environment").get("host of a decode step, ms", {}).get("sum")
    yield Goal(name="host of a step of 512 decode rows, ms", found=host_ms, bound=2.0, is_least=False)
    in_fp8 = _speedup(batches, "ours in fp8: prefill", "ours: prefill")
    yield Goal(name="fp8 over bf16 on prefill", found=in_fp8, bound=1.6)


def _median(values: Iterator[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None


def _speedup(batches: Mapping[str, Any], name: str, other: str) -> float | None:
    ours, theirs = batches.get(name), batches.get(other)
    if ours is None or theirs is None:
        return None
    return float(theirs["median_seconds"] / ours["median_seconds"])


def print_goals(folder: Path) -> None:
    """One line per goal. The goals are for one H200; each file's device and commit are named above the table."""
    print("\nGoals for one H200; measured:")
    for name in ("environment", "gate", "batches", "attention"):
        found = read_stage(folder, name)
        print(f"  {name:12} {found['hardware']}, commit {found['commit']}" if found else f"  {name:12} nothing yet")
    for goal in goals(folder):
        value = "-" if goal.found is None else f"{goal.found:.3g}"
        word = "least" if goal.is_least else "most"
        print(f"{goal.name:52} {value:>8}  at {word} {goal.bound:<5} {goal.verdict}", flush=True)
