"""The line to the process that computes prompts: starts it, sends it steps, takes what they came to in turn."""

import os
import queue
import socket
import subprocess
import sys
import threading
from collections import deque
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from engine.config import EngineConfig
from engine.device.placement import dtype_name
from engine.disaggregation.block_transport import (
    MOST_STEPS_UNDER_WAY,
    BlockTransport,
    DistributedTransport,
    SharedMemoryTransport,
)
from engine.disaggregation.prefill_message import PrefillJob, PrefillStep
from engine.errors import PrefillWorkerError
from engine.kv.kv_cache import KVCache, KVShape
from engine.scheduling.token_batch import TokenBatch

_WORKER_RANK = 1


class PrefillClient:
    """A worker in use; what it answers is read by a thread of its own. Made by `open_prefill_client`."""

    def __init__(self, transport: BlockTransport, process: subprocess.Popen[bytes] | None) -> None:
        self._transport = transport
        self._process = process
        self._under_way: deque[npt.NDArray[np.int32]] = deque()
        self._answers: queue.SimpleQueue[tuple[object, torch.Tensor | None]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_read_answers, args=(transport, self._answers), daemon=True)
        self._reader.start()
        self.is_closed = False

    @property
    def can_send(self) -> bool:
        return len(self._under_way) < MOST_STEPS_UNDER_WAY

    def open(self, job: PrefillJob) -> None:
        """Tells the worker what to be like; it answers steps once it is."""
        self._tell(job)

    def send(self, batch: TokenBatch, *, is_compiled: bool) -> None:
        """Has a step computed, after those sent before."""
        self._under_way.append(written_blocks(batch))
        self._tell(PrefillStep(batch=batch, is_compiled=is_compiled))

    def take(self, cache: KVCache, *, waits: bool) -> torch.Tensor | None:
        """Writes the KV of the oldest step under way into the same blocks of `cache`, once it is computed.

        Returns:
            ``[R, hidden]`` of its output rows, in host memory; None where it is not there yet, and nobody waits.
        Raises:
            PrefillWorkerError: the worker is gone.
            Exception: whatever the worker has failed with.
        """
        try:
            answer, kv = self._answers.get(block=waits)
        except queue.Empty:
            return None
        if not isinstance(answer, torch.Tensor):
            raise self._reason(answer)
        assert kv is not None
        cache.write_blocks(self._under_way.popleft(), kv)
        return answer

    def abandon(self, cache: KVCache) -> None:
        """Nobody wants what is under way: a process of our own is ended, another one is let finish it."""
        try:
            while self._process is None and self._under_way:
                self.take(cache, waits=True)
        except Exception:  # the failure that it is abandoned for, or that the next use meets
            self.close()
        if self._process is not None:
            self.close()

    def close(self) -> None:
        """Ends the line, and the process if it is ours, whatever it is doing."""
        if self.is_closed:
            return
        self.is_closed = True
        self._transport.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def _tell(self, message: object) -> None:
        try:
            self._transport.send(message)
        except (OSError, RuntimeError) as error:
            # Its last words, if it has left any, say more than that it is gone.
            while isinstance(answer := self._answers.get()[0], torch.Tensor):
                pass
            raise self._reason(answer) from error

    def _reason(self, answer: object) -> Exception:
        if isinstance(answer, Exception) and not isinstance(answer, _LineBroken):
            return answer
        status = "the process that computes prompts is gone"
        if self._process is not None:
            self._process.kill()
            status += f"; its exit status is {self._process.wait()}"
        return PrefillWorkerError(f"{status}: {answer}")


class _LineBroken(Exception):
    """What a reader that can read no more leaves behind."""


def open_prefill_client(model: str | None, config: EngineConfig, cache: KVCache, shape: KVShape) -> PrefillClient:
    """A worker with KV memory of as many blocks as `cache`: a new process, or the other one of two distributed ones.

    Args:
        model: checkpoint that a new process loads.
        config: of the engine; `device` is where a new process is to compute.
    """
    job = PrefillJob(
        model=model if config.disaggregation == "processes" else None,
        config=replace(
            config,
            disaggregation="none",
            dtype=dtype_name(shape.dtype),
            kv_memory_bytes=cache.num_blocks * cache.block_bytes,
        ),
        kv_shape=shape,
    )
    if config.disaggregation == "processes":
        # A step writes no block twice, and padding goes into one more.
        client = _start_worker((cache.num_blocks + 1) * cache.block_bytes)
    else:
        client = PrefillClient(DistributedTransport(_WORKER_RANK), None)
    client.open(job)
    return client


def written_blocks(batch: TokenBatch) -> npt.NDArray[np.int32]:
    """Ids of the blocks that a step writes to, ascending: both processes know which ones are handed over after it."""
    return np.unique(batch.attention.slot_mapping // batch.attention.block_size).astype(np.int32)


def _start_worker(num_region_bytes: int) -> PrefillClient:
    """A new interpreter, which ends when the line does: even where this process is killed, none is left behind."""
    num_bytes = MOST_STEPS_UNDER_WAY * num_region_bytes
    ours, theirs = socket.socketpair()
    memory_fd = os.memfd_create("batchloom-kv")
    try:
        os.truncate(memory_fd, num_bytes)
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.prefill_worker", str(theirs.fileno()), str(memory_fd), str(num_bytes)],
            pass_fds=(theirs.fileno(), memory_fd),
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # an interrupt from the keyboard is for us to judge
        )
        return PrefillClient(SharedMemoryTransport(ours, memory_fd, num_bytes), process)
    finally:
        theirs.close()
        os.close(memory_fd)


def _read_answers(transport: BlockTransport, answers: "queue.SimpleQueue[tuple[object, torch.Tensor | None]]") -> None:
    while True:
        try:
            answer = transport.receive()
        except Exception as error:
            answer = (_LineBroken(f"{type(error).__name__}: {error}"), None)
        answers.put(answer)
        if answer[0] is None or isinstance(answer[0], _LineBroken):
            return
