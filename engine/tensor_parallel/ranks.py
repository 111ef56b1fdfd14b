"""The first rank of a sharded model: it starts the other ranks, sends them each step, and fails when one fails."""

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from engine.config import EngineConfig
from engine.device.placement import resolve_device, use_device
from engine.disaggregation.worker_line import WorkerLine, start_worker
from engine.errors import BatchloomError, OutOfMemoryError, PrefillWorkerError
from engine.model.shard import Shard
from engine.model.sharded_model import check_ranks
from engine.scheduling.token_batch import TokenBatch

Made = TypeVar("Made")

LAST_MESSAGE_SECONDS = 3.0
"""Time to wait for a rank's error message after a collective operation with it has failed."""


class RankFailure(RuntimeError):
    """A rank has failed or is gone. No `BatchloomError`: the step's rows may be the cause, so they are retried."""


class RankMemoryFailure(RankFailure, MemoryError):
    """A rank had too little memory for a step."""


class Ranks(Shard):
    """Rank 0 and its connections to the other ranks, which are processes that end when their connection is closed."""

    def __init__(self, model: str, config: EngineConfig) -> None:
        """Starts the other ranks, and waits until all are ready: rank r computes on the r-th GPU from the config's
        device on. Raises `RankFailure` if one ended before it was ready."""
        device = resolve_device(config.device)
        use_device(device)
        super().__init__(0, config.tensor_parallel_size, device)
        devices = rank_devices(device, self.size)
        self.is_closed = False
        self._failure: Exception | None = None
        self._has_failed = threading.Event()
        self._meeting_fd = os.memfd_create("batchloom-ranks")  # the kernel frees it however this process ends
        meeting_file = Path(f"/proc/{os.getpid()}/fd/{self._meeting_fd}")
        self._workers = [start_worker(num_bytes=2) for _ in range(1, self.size)]
        self._readers: list[threading.Thread] = []
        with self.watched():
            for rank, (line, _) in enumerate(self._workers, 1):
                line.send((model, replace(config, device=devices[rank]), rank, meeting_file))
                self._take_ready(rank, line)
                reader = threading.Thread(target=self._read, args=(rank, line), daemon=True)
                reader.start()
                self._readers.append(reader)
            self.join(meeting_file)

    def send(self, batch: TokenBatch) -> None:
        for line, _ in self._workers:
            line.send(batch)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Ends all ranks where the block raises; raises the error of the rank that failed first."""
        try:
            yield
            self._check()
        except GeneratorExit:
            raise
        except BaseException as error:
            self._has_failed.wait(LAST_MESSAGE_SECONDS)
            reason = self._failure
            self.close()
            if reason is None or reason is error or not isinstance(error, Exception):
                raise
            raise reason from error

    def watch(self, steps: Generator[Any, None, None]) -> Generator[Any, None, None]:
        """The steps of a run; raises in place of a step that a failed rank took part in."""
        with self.watched(), contextlib.closing(steps):
            for done in steps:
                self._check()
                yield done

    def close(self) -> None:
        """Kills the other ranks."""
        if self.is_closed:
            return
        self.is_closed = True
        for line, process in self._workers:
            line.close()
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()
        self.leave()
        os.close(self._meeting_fd)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _take_ready(self, rank: int, line: WorkerLine) -> None:
        try:
            message = line.receive()[0]
        except Exception:
            raise self._explain(rank, None) from None
        if message is not None:
            raise self._explain(rank, message)

    def _read(self, rank: int, line: WorkerLine) -> None:
        """Waits for a rank's last message. A GPU that waits in a collective operation with that rank is released."""
        try:
            message = line.receive()[0]
        except Exception:
            message = None
        if not self.is_closed:
            self._failure = self._failure or self._explain(rank, message)
            self._has_failed.set()
            if self.device.type != "cpu":
                self.leave()

    def _explain(self, rank: int, message: Any) -> Exception:
        """The error for a rank's last message; `message` is None where the rank ended without one."""
        name = f"rank {rank} of {self.size}"
        if message is None:
            status = self._workers[rank - 1][1].wait()
            return RankFailure(f"{name} of the model (tensor_parallel_size) is gone; its exit status is {status}")
        if isinstance(message, OutOfMemoryError):
            return RankMemoryFailure(f"{name}: {message}")
        if isinstance(message, BatchloomError) and not isinstance(message, PrefillWorkerError):
            return message
        return RankFailure(f"{name}: {message}")


def rank_devices(device: torch.device, size: int) -> list[str]:
    """The device of each rank: consecutive GPUs from `device` on, or the CPU, which all share."""
    return ["cpu" if device.type == "cpu" else f"cuda:{(device.index or 0) + rank}" for rank in range(size)]


def lead(load: Callable[..., Made], folder: Path, config: EngineConfig) -> Made:
    """Loads an engine with a sharded model, whose first rank is this process.

    Args:
        load: loads the engine of a rank; called with `shard`.
        folder: the model's checkpoint.
    Raises:
        ConfigError, ModelError: see `check_ranks`.
        RankFailure: a rank ended before it was ready.
    """
    check_ranks(config, folder)
    ranks = Ranks(str(folder), config)
    with ranks.watched():
        engine = load(shard=ranks)
    weakref.finalize(engine, ranks.close)
    return engine
