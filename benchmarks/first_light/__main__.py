"""Measurements for the first minutes with a GPU, most valuable first:  python -m benchmarks.first_light --out FOLDER

environment   what is installed; matrix rate, copies, launches
gate          every kind of tile, merges, the engine's answers, graphs, compute-sanitizer
batches       whole batches in the shape of an 8B model, against a server's policies and transformers; profiles
tuning        launches and costs of what 8B models need, and the cost model's error
attention     BatchLLM's Fig. 8 grid, with the tuned launches
again         the worst cases of the grid, measured again

and, only where --stages names them:

flex          FlexAttention on some of the grid
extras        the engine without the packages that it does not need, which tests on a CPU show, too

Each stage is a process with a time limit. Where a part crashes, hangs or loses the device, another process goes on
with the parts after it. Results are written as they come, one JSON file per stage. The
same command again skips finished parts, continues unfinished ones, and then repeats failed ones. If device, versions
or commit differ, a stage starts over.

A stage ends with 0: done, 1: something failed, 3: out of time, 4: the device was lost, 124: killed at its limit, 125:
killed in a part that took too long, or a crash's own code. The program ends with 0 if all stages did, 1 if one failed,
3 if only time was short (3 or 124). `--tiny` runs everything on the CPU in Triton's interpreter (TRITON_INTERPRET=1),
at sizes whose figures mean nothing.
"""

import argparse
import contextlib
import importlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.first_light.goals import print_goals
from benchmarks.first_light.results import DONE, FAILED, HUNG, LOST, TIMED_OUT, UNFINISHED, now, read_stage
from benchmarks.measuring.machine import commit
from benchmarks.measuring.result_file import write_result

STAGE_MINUTES = {
    "environment": 2.0, "gate": 5.0, "batches": 9.5, "tuning": 8.0, "attention": 8.0, "again": 1.5, "flex": 5.0,
    "extras": 2.0,
}  # fmt: skip
"""By stage, its time limit in one call."""

ON_REQUEST = ("flex", "extras")
"""Stages that run only where they are named."""

PART_MINUTES = {
    "environment": 1.8, "gate": 2.8, "attention": 1.0, "again": 1.0, "flex": 2.0, "batches": 3.5, "extras": 1.8,
}  # fmt: skip
"""By stage, after how long a part counts as hanging. Those of tuning take what time they are given."""

LAST_SECONDS = 25.0
"""Time for a part that is running when no further part may start."""

LEAST_SECONDS = 10.0
"""A stage does not start with less time left."""


def run_stage(name: str, arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Run a stage, in another process after each part that crashes, hangs or loses the device."""
    started = time.monotonic()
    end_part(arguments.out, name, TIMED_OUT)  # of a call that was killed
    goes_on = False
    while True:
        left = seconds - (time.monotonic() - started)
        print(f"== {name}, at most {left:.0f} s", flush=True)
        exit_code = run_process(name, arguments, left, goes_on)
        goes_on = end_part(arguments.out, name, exit_code) or exit_code == LOST
        left = seconds - (time.monotonic() - started)
        if not goes_on or left < LEAST_SECONDS:
            return {"exit_code": exit_code, "seconds": round(time.monotonic() - started, 1)}


def run_process(name: str, arguments: argparse.Namespace, seconds: float, goes_on: bool) -> int:
    """The exit code of a stage's process, which is killed with all its children at its limit or that of a part."""
    ends = time.monotonic() + seconds
    begin = max(1.0, seconds - LAST_SECONDS)
    command = [
        sys.executable, "-m", "benchmarks.first_light", "--child", name, "--seconds", str(begin), "--out",
        str(arguments.out.resolve()), *(["--tiny"] if arguments.tiny else []), *(["--goes-on"] if goes_on else []),
        *(["--commit", arguments.commit] if arguments.commit else []),
    ]  # fmt: skip
    process = subprocess.Popen(command, start_new_session=True)
    try:
        while (left := ends - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(left, 1.0))
            if seconds_in_part(arguments.out, name) > 60 * PART_MINUTES.get(name, math.inf):
                return HUNG
        return TIMED_OUT
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also processes that a crashed stage has started
        process.wait()


def seconds_in_part(folder: Path, name: str) -> float:
    """How long a stage has been measuring the part that it measures now; 0 between parts."""
    if "running" not in read_stage(folder, name):
        return 0.0
    return time.time() - (folder / f"{name}.json").stat().st_mtime  # the file was written when the part began


def end_part(folder: Path, name: str, exit_code: int) -> bool:
    """Note that a stage's process has ended, in a part if its file says so; whether that part has failed. It has not
    where only the stage's time was over: the next call begins it again."""
    found = read_stage(folder, name)
    part = found.pop("running", None)
    if part is None:
        return False
    if exit_code != TIMED_OUT:
        why = (
            f"killed after {PART_MINUTES[name]} minutes" if exit_code == HUNG else f"its process ended with {exit_code}"
        )
        found["parts"][part] = {"failure": why, "at": now()}
        found["status"] = "failed"
        print(f"{part}: FAILED: {why}", flush=True)
    write_result(folder / f"{name}.json", found)
    return exit_code != TIMED_OUT


def run_child(arguments: argparse.Namespace) -> int:
    """A stage, in this process."""
    from benchmarks.first_light.stage_run import LostDeviceError, StageRun

    stage = StageRun(
        arguments.child, arguments.out, seconds=arguments.seconds, is_tiny=arguments.tiny, commit=arguments.commit,
        goes_on=arguments.goes_on,
    )  # fmt: skip
    if stage.is_done:
        print("done before", flush=True)
        return DONE
    try:
        return stage.run_parts(importlib.import_module(f"benchmarks.first_light.{arguments.child}").run)
    except LostDeviceError:
        sys.stdout.flush()
        os._exit(LOST)  # without what Python does at the end, which could wait for the device


def main(command_line: Sequence[str] | None = None) -> int:
    """Measures as `command_line` says (the process's own if None); returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_light",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument(
        "--stages",
        nargs="+",
        choices=STAGE_MINUTES,
        metavar="STAGE",
        default=[name for name in STAGE_MINUTES if name not in ON_REQUEST],
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="of the whole call")
    parser.add_argument("--commit", help="of this tree, where it is not git's: recorded with every result")
    parser.add_argument("--tiny", action="store_true", help="on the CPU in Triton's interpreter, for tests")
    parser.add_argument("--child", choices=STAGE_MINUTES, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--goes-on", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(command_line)
    if arguments.tiny and os.environ.get("TRITON_INTERPRET") != "1":
        parser.error("--tiny needs TRITON_INTERPRET=1 in the environment")
    if arguments.child:
        return run_child(arguments)
    if not arguments.tiny and arguments.commit is None and commit() == "unknown":
        parser.error("the tree has no git to tell its commit: name it with --commit")
    arguments.out.mkdir(parents=True, exist_ok=True)
    ends = time.monotonic() + 60 * arguments.minutes
    stages: dict[str, dict[str, Any]] = {}
    for name in arguments.stages:
        seconds = min(60 * STAGE_MINUTES[name], ends - time.monotonic())
        has_time = seconds >= LEAST_SECONDS
        stages[name] = run_stage(name, arguments, seconds) if has_time else {"exit_code": UNFINISHED, "seconds": 0.0}
        write_result(arguments.out / "stages.json", stages)
    for name, ended in stages.items():
        print(f"{name:12} exit code {ended['exit_code']:4}  {ended['seconds']:7.1f} s", flush=True)
    print_goals(arguments.out)
    codes = {ended["exit_code"] for ended in stages.values()} - {0}
    if not codes:
        return 0
    return UNFINISHED if codes <= {UNFINISHED, TIMED_OUT} else FAILED


if __name__ == "__main__":
    sys.exit(main())
