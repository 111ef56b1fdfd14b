"""An engine's process, as the measuring program uses it: started, called, stopped while others are measured."""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Answers, Loaded, LoadSettings, Work

ROOT = Path(__file__).parents[2]
FAREWELL_SECONDS = 20


class PeerError(Exception):
    """An engine cannot be loaded, fails, or does not answer in time; the message names it and the reason."""


def require_all_answers(name: str, work: Work, answers: Answers) -> None:
    """Raises `PeerError` unless each prompt has an answer of the wanted length."""
    if work.schema:
        found, expected = {0 < len(tokens) <= work.num_output_tokens for tokens in answers.token_ids}, True
    elif answers.label_logprobs:
        found, expected = {len(scores) for scores in answers.label_logprobs}, len(work.labels)
    else:
        found = {len(tokens) for tokens in answers.token_ids}
        expected = 1 if work.labels else work.num_output_tokens
    if len(answers.token_ids) != len(work.token_ids) or found != {expected}:
        raise PeerError(
            f"{name}: {len(answers.token_ids)} answers of {sorted(found)} tokens, "
            f"expected {len(work.token_ids)} of {expected}"
        )


class PeerProcess:
    """One engine in its own process group. Between calls the group is stopped, so it takes no CPU time.

    Use as a context manager; leaving it ends the group.
    """

    def __init__(
        self, name: str, python: Path, module: str, arguments: Sequence[str], *, log: Path, threads: int
    ) -> None:
        self.name = name
        self._log = log
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(ROOT),
        }
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, "-m", module, *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, cwd=ROOT, env=environment,
                start_new_session=True,
            )  # fmt: skip
        self._received = b""

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(FAREWELL_SECONDS)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        self._signal(signal.SIGKILL)  # its children, too
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended, as one that took too long."""
        return self._process.poll() is not None

    def load(self, settings: LoadSettings, timeout_seconds: float) -> tuple[Loaded, float, dict[str, int]]:
        """Load the model; gives versions and details, seconds, peak memory. Raises `PeerError`."""
        reply = self.call("load", asdict(settings), timeout_seconds)
        return Loaded(**reply["answer"]), reply["seconds"], reply["memory"]

    def run(self, work: Work, timeout_seconds: float) -> tuple[Answers, dict[str, int]]:
        """The answers and the peak memory. Raises `PeerError`, also for a wrong number or length of answers."""
        reply = self.call("run", asdict(work), timeout_seconds)
        answers = Answers(**reply["answer"])
        require_all_answers(self.name, work, answers)
        return answers, reply["memory"]

    def call(self, name: str, arguments: dict[str, Any], timeout_seconds: float) -> dict[str, Any]:
        """Continue the process, call a method of its engine, stop it again. Raises `PeerError`."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"call": name, "arguments": arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure(f"ended before it was asked to {name}") from error
        reply: dict[str, Any] = json.loads(self._read_line(name, timeout_seconds))
        self._signal(signal.SIGSTOP)
        if "error" in reply:
            with self._log.open("a") as log:
                log.write(reply["traceback"])
            raise self._failure(f"{name}: {reply['error']}")
        return reply

    def _read_line(self, name: str, timeout_seconds: float) -> bytes:
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + timeout_seconds
        parts = [self._received]
        while b"\n" not in parts[-1]:
            is_ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not is_ready:
                # Else it would go on computing, and its late answer would be taken for the next one.
                self._signal(signal.SIGKILL)
                self._process.wait()
                raise self._failure(f"{name} took more than {timeout_seconds:.0f} s, and was ended")
            parts.append(os.read(pipe, 1 << 20))
            if not parts[-1]:
                raise self._failure(f"ended during {name} with exit code {self._process.wait()}")
        line, _, self._received = b"".join(parts).partition(b"\n")
        return line

    def _failure(self, what: str) -> PeerError:
        return PeerError(f"{self.name}: {what} (its log: {self._log})")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # the group has ended; the next call reports it
            os.killpg(self._process.pid, number)
