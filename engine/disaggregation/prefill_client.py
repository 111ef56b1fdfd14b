"""The decoding process's side of disaggregation: starts the worker process, sends steps, takes their KV in order."""

import queue
import threading
from collections import deque
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from engine.config import EngineConfig
from engine.disaggregation.worker_line import MOST_STEPS_IN_FLIGHT, WorkerLine, start_worker
from engine.errors import BatchloomError, PrefillWorkerError
from engine.kv.kv_cache import KVCache, KVShape
from engine.scheduling.token_batch import TokenBatch


class PrefillClient:
    """A worker process with as many KV blocks as `cache`, in which its KV arrives; a thread reads its answers. The
    worker ends when its line is closed, so none is left behind even where this process is killed."""

    def __init__(self, model: str, config: EngineConfig, cache: KVCache, shape: KVShape) -> None:
        """Starts the worker, which computes steps once it has loaded `model`. `config`, `cache` and `shape` are those
        of the engine that decodes; the config names the worker's device."""
        # A step writes each block at most once, and padding goes into one more block.
        num_bytes = MOST_STEPS_IN_FLIGHT * (cache.num_blocks + 1) * cache.block_bytes
        self._line, self._process = start_worker(num_bytes)
        self._cache = cache
        self._in_flight: deque[npt.NDArray[np.int32]] = deque()
        self._answers: queue.SimpleQueue[tuple[object, torch.Tensor | None]] = queue.SimpleQueue()
        self._reader = threading.Thread(target=_read_answers, args=(self._line, self._answers), daemon=True)
        self._reader.start()
        config = replace(config, disaggregation="none", kv_memory_bytes=cache.num_blocks * cache.block_bytes)
        self._tell((model, config, shape))

    @property
    def can_send(self) -> bool:
        return len(self._in_flight) < MOST_STEPS_IN_FLIGHT

    def send(self, batch: TokenBatch, *, is_compiled: bool) -> None:
        """Sends a step of prompts, computed after those sent before; block ids are the same in both processes.
        `is_compiled` says whether the worker compiles its layers."""
        self._in_flight.append(written_blocks(batch))
        self._tell((batch, is_compiled))

    def take(self, *, waits: bool) -> torch.Tensor | None:
        """Takes the oldest step in flight, and writes its KV into the same blocks of this process. Returns
        ``[R, hidden]`` of its output rows, on the device of the cache; None where it is not computed yet and nobody
        `waits` for it. Raises `PrefillWorkerError` if the worker is gone, or the error with which it has failed."""
        try:
            answer, kv = self._answers.get(block=waits)
        except queue.Empty:
            return None
        if not isinstance(answer, torch.Tensor):
            raise self._reason(answer)
        assert kv is not None
        self._cache.write_blocks(self._in_flight.popleft(), kv)
        return answer.to(self._cache.keys[0].device)

    def close(self) -> None:
        """Kills the worker."""
        self._line.close()
        self._process.kill()
        self._process.wait()
        self._reader.join()

    def _tell(self, message: object) -> None:
        try:
            self._line.send(message)
        except OSError as error:
            # The worker's last message is its error, which says more than that the line is closed.
            while isinstance(answer := self._answers.get()[0], torch.Tensor):
                pass
            raise self._reason(answer) from error

    def _reason(self, answer: object) -> Exception:
        if isinstance(answer, BatchloomError):
            return answer
        self._process.kill()
        return PrefillWorkerError(
            f"the process that computes prompts is gone; its exit status is {self._process.wait()}: "
            f"{type(answer).__name__}: {answer}"
        )


def written_blocks(batch: TokenBatch) -> npt.NDArray[np.int32]:
    """Ids of the blocks that a step writes to, ascending. Both processes derive from them which KV is transferred."""
    slots = np.concatenate([batch.attention.slot_mapping, *(other.slot_mapping for other in batch.more_attention)])
    return np.unique(slots // batch.attention.block_size).astype(np.int32)


def _read_answers(line: WorkerLine, answers: "queue.SimpleQueue[tuple[object, torch.Tensor | None]]") -> None:
    """Puts the worker's answers into the queue, and at last the error with which the line has ended."""
    try:
        while True:
            answers.put(line.receive())
    except Exception as error:
        answers.put((error, None))
