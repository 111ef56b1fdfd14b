"""Runs the parts of one stage; each result is written at once, so a crash or the end of the time does not lose it."""

import json
import platform
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, is_dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.first_light.results import DONE, FAILED, UNFINISHED, found_parts, now, read_stage
from benchmarks.kernels.gpu import GpuRun, in_one_line, require_gpu
from benchmarks.measuring.machine import commit
from benchmarks.measuring.result_file import write_result
from engine.device.gpu import has_failed


class LostDeviceError(Exception):
    """A part has failed, which is recorded, and the process cannot use the device any more."""


class StageRun:
    """Measures the parts of a stage, and skips those that its file holds already.

    A part that failed in an earlier call is measured again when all others have been, so that a part that crashes or
    hangs each time hides no other. What failed in this call is not repeated in it.

    Args:
        goes_on: after a process of the same call that ended within a part.

    Attributes:
        run: the device, its versions and the commit; a file with others is started over.
        is_tiny: sizes for Triton's interpreter on the CPU; such figures mean nothing.
        seconds_left: time in which a part may start.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        *,
        seconds: float,
        is_tiny: bool,
        commit: str | None = None,
        goes_on: bool = False,
    ) -> None:
        self.is_tiny = is_tiny
        self.folder = folder
        run = interpreted_run() if is_tiny else require_gpu("benchmarks.first_light")
        self.run = replace(run, commit=commit) if commit else run
        self._file = folder / f"{name}.json"
        self._ends = time.monotonic() + seconds
        self._left_out: list[str] = []
        self._origin = {
            "hardware": self.run.hardware,
            "versions": f"{self.run.versions}, transformers {version('transformers')}",
            "commit": self.run.commit,
        }
        new = {"stage": name, **self._origin, "status": "begun", "parts": {}}
        self._document: dict[str, Any] = self._read(name) or new
        if not goes_on:
            self._document["failed_before"] = self._failed
        self._is_repeating = False

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._ends - time.monotonic())

    @property
    def is_done(self) -> bool:
        return bool(self._document["status"] == "done")

    @property
    def _failed(self) -> list[str]:
        return [name for name, part in self._document["parts"].items() if "failure" in part]

    def found_by(self, name: str) -> dict[str, Any]:
        """Another stage's results by part; none where its device, versions or commit differ from this run's."""
        return found_parts(self._read(name))

    def _read(self, name: str) -> dict[str, Any]:
        """A stage's file; empty if there is none of this device, these versions and this commit."""
        found = read_stage(self.folder, name)
        return found if all(found.get(key) == value for key, value in self._origin.items()) else {}

    def run_parts(self, run: Callable[["StageRun"], None]) -> int:
        """Measure the parts of a stage, those that failed before at last; returns its exit code.

        Args:
            run: calls `measure` for each part.
        Raises:
            LostDeviceError: see there.
        """
        run(self)
        if self._document["failed_before"]:
            self._is_repeating = True
            run(self)
        return self.end()

    def measure(self, name: str, part: Callable[[], Any], seconds: float = 0.0) -> Any:
        """Keep the result of `part`, or its error; returns None if it failed or no time was left.

        Args:
            seconds: of `seconds_left`, those without which the part is not begun.
        Raises:
            LostDeviceError: see there.
        """
        parts, failed_before = self._document["parts"], self._document["failed_before"]
        is_repeated = self._is_repeating and name in failed_before
        if name in parts and not is_repeated:
            return parts[name].get("found")
        if self.seconds_left <= seconds:
            if name not in self._left_out:
                self._left_out.append(name)
            return None
        if is_repeated:
            failed_before.remove(name)
        self._document |= {"status": "begun", "running": name}
        write_result(self._file, self._document)
        started = time.monotonic()
        try:
            found = part()
        except (Exception, SystemExit) as failure:
            traceback.print_exc()
            parts[name] = {"failure": in_one_line(failure)}
            print(f"{name}: FAILED: {parts[name]['failure']}", flush=True)
            found = None
        else:
            found = asdict(found) if is_dataclass(found) and not isinstance(found, type) else found
            parts[name] = {"found": found}
            print(f"{name}: {json.dumps(found)[:600]}", flush=True)
        parts[name] |= {"seconds": round(time.monotonic() - started, 2), "at": now()}
        del self._document["running"]
        write_result(self._file, self._document)
        if "failure" in parts[name] and has_failed():
            raise LostDeviceError(name)
        return found

    def end(self) -> int:
        """Write how the stage ended; returns its exit code."""
        failed = self._failed
        self._document["status"] = "failed" if failed else "unfinished" if self._left_out else "done"
        write_result(self._file, self._document)
        for name in self._left_out:
            print(f"no time was left for: {name}", flush=True)
        return FAILED if failed else UNFINISHED if self._left_out else DONE


def interpreted_run() -> GpuRun:
    """The CPU with Triton's interpreter; its results are marked as meaningless."""
    return GpuRun(
        device=torch.device("cpu"),
        hardware="Triton's interpreter, no figure",
        versions=f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}",
        commit=commit(),
        num_processors=1,
    )
