"""The process that computes prompts, as the one that decodes uses it: start it, send steps, take their KV in turn."""

import os
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from engine.child_process import start_child
from engine.config import EngineConfig
from engine.device.placement import dtype_name
from engine.disaggregation.worker_line import MOST_STEPS_UNDER_WAY, PrefillJob, WorkerLine, WorkerStep
from engine.errors import PrefillWorkerError
from engine.kv.block_copies import BlockCopies
from engine.kv.kv_cache import KVCache, KVShape
from engine.scheduling.token_batch import TokenBatch


class PrefillClient:
    """A new process with KV memory of as many blocks as `cache`; a thread reads its answers.

    The process ends when the line does, so none is left behind even where this process is killed.
    """

    def __init__(self, model: str, config: EngineConfig, cache: KVCache, shape: KVShape) -> None:
        """Starts the process; it answers steps once it has loaded the model.

        Args:
            model: checkpoint that the process loads.
            config: of the engine that decodes, with the device of the new process.
            cache: the KV memory of the engine that decodes.
            shape: of the KV; the model of the new process must have the same.
        """
        # A step writes no block twice, and padding goes into one block more.
        num_bytes = MOST_STEPS_UNDER_WAY * (cache.num_blocks + 1) * cache.block_bytes
        self._line, self._process = start_worker("engine.prefill_worker", num_bytes)
        self._under_way: deque[npt.NDArray[np.int32]] = deque()
        self._answers: queue.SimpleQueue[tuple[object, torch.Tensor | None]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_read_answers, args=(self._line, self._answers), daemon=True)
        self._reader.start()
        self.is_closed = False
        config = replace(
            config,
            disaggregation="none",
            dtype=dtype_name(shape.dtype),
            kv_memory_bytes=cache.num_blocks * cache.block_bytes,
        )
        self._tell(PrefillJob(model=model, config=config, kv_shape=shape))

    @property
    def can_send(self) -> bool:
        return len(self._under_way) < MOST_STEPS_UNDER_WAY

    def send(self, batch: TokenBatch, *, is_compiled: bool) -> None:
        """Has a step computed, after those sent before.

        Args:
            batch: prompts alone; block ids mean the same in both processes.
            is_compiled: whether the process is to compile its layers.
        """
        self._under_way.append(written_blocks(batch))
        self._tell(WorkerStep(batch=batch, is_compiled=is_compiled))

    def take(self, cache: KVCache, *, waits: bool) -> torch.Tensor | None:
        """Writes the KV of the oldest step under way into the same blocks of `cache`, once it is computed.

        Args:
            cache: the KV memory of this process.
            waits: whether to wait for the step.
        Returns:
            ``[R, hidden]`` of its output rows, in host memory; None where it is not there yet.
        Raises:
            PrefillWorkerError: the process is gone.
            Exception: whatever the process has failed with.
        """
        try:
            answer, kv = self._answers.get(block=waits)
        except queue.Empty:
            return None
        if not isinstance(answer, torch.Tensor):
            raise self._reason(answer)
        assert kv is not None
        BlockCopies(cache).write_blocks(self._under_way.popleft(), kv)
        return answer

    def close(self) -> None:
        """Ends the process, whatever it is doing."""
        if not self.is_closed:
            self.is_closed = True
            self._line.close()
            self._process.kill()
            self._process.wait()
            self._reader.join()

    def _tell(self, message: object) -> None:
        try:
            self._line.send(message)
        except OSError as error:
            # The last message of the process says more than that it is gone.
            while isinstance(answer := self._answers.get()[0], torch.Tensor):
                pass
            raise self._reason(answer) from error

    def _reason(self, answer: object) -> Exception:
        if isinstance(answer, Exception) and not isinstance(answer, _LineBroken):
            return answer
        self._process.kill()
        return PrefillWorkerError(
            f"the process that computes prompts is gone; its exit status is {self._process.wait()}: {answer}"
        )


class _LineBroken(Exception):
    """Left by the reader when it can read no more."""


def written_blocks(batch: TokenBatch) -> npt.NDArray[np.int32]:
    """Ids of the blocks that a step writes to, ascending: both processes know which ones are handed over after it."""
    slots = np.concatenate([batch.attention.slot_mapping, *(other.slot_mapping for other in batch.more_attention)])
    return np.unique(slots // batch.attention.block_size).astype(np.int32)


def start_worker(
    module: str, num_bytes: int, arguments: Sequence[str] = ()
) -> "tuple[WorkerLine, subprocess.Popen[bytes]]":
    """A new process and the line to it.

    Args:
        module: whose first arguments are the descriptors of socket and memory, and the memory's bytes.
        num_bytes: of shared memory.
        arguments: that follow.
    """
    memory_fd = os.memfd_create("batchloom-kv")
    try:
        os.truncate(memory_fd, num_bytes)
        arguments = (str(memory_fd), str(num_bytes), *arguments)
        ours, process = start_child(module, arguments, pass_fds=(memory_fd,))
        return WorkerLine(ours, memory_fd, num_bytes), process
    finally:
        os.close(memory_fd)


def _read_answers(line: WorkerLine, answers: "queue.SimpleQueue[tuple[object, torch.Tensor | None]]") -> None:
    while True:
        try:
            answer = line.receive()
        except Exception as error:
            answer = (_LineBroken(f"{type(error).__name__}: {error}"), None)
        answers.put(answer)
        if isinstance(answer[0], _LineBroken):
            return
