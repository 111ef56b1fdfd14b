"""Two ranks of a model as threads of one process, which compute in turn and sum up what processes would."""

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.engine import Engine
from engine.model.shard import Shard
from engine.scheduling.token_batch import TokenBatch


class Meeting:
    """Where two ranks exchange tensors. Whoever computes holds the lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.batches: queue.SimpleQueue[TokenBatch | None] = queue.SimpleQueue()
        self.num_sums = [0, 0]
        self._parts: list[torch.Tensor] = [torch.empty(0)] * 2
        self._barrier = threading.Barrier(2, timeout=120)

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of both ranks, in their order."""
        self._parts[rank] = tensor.clone()
        self.lock.release()
        self._barrier.wait()
        parts = list(self._parts)
        self._barrier.wait()
        self.lock.acquire()
        return parts


class ThreadShard(Shard):
    """A rank that is a thread."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, 2, torch.device("cpu"))
        self._meeting = meeting

    def all_reduce(self, partial_sum: torch.Tensor) -> None:
        self._meeting.num_sums[self.rank] += 1
        first, second = self._meeting.exchange(self.rank, partial_sum)
        partial_sum.copy_(first + second)

    def agree(self, value: int) -> int:
        return min(int(part) for part in self._meeting.exchange(self.rank, torch.tensor(value)))

    def take_first(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor.copy_(self._meeting.exchange(self.rank, tensor)[0])
        return tensor

    def send(self, batch: TokenBatch) -> None:
        if self.rank == 0:
            self._meeting.batches.put(batch)


@contextmanager
def two_ranks(model: Path, config: EngineConfig) -> Iterator[tuple[Engine, Meeting]]:
    """The first rank's engine; the second rank computes beside it until the block ends."""
    meeting = Meeting()
    failures: list[BaseException] = []

    def compute_second() -> None:
        try:
            with meeting.lock:
                engine = Engine.load(model, config, shard=ThreadShard(1, meeting))
            while (batch := meeting.batches.get()) is not None:
                with meeting.lock:
                    engine._runner.forward(batch)
        except BaseException as error:
            failures.append(error)
            raise

    second = threading.Thread(target=compute_second)
    second.start()
    try:
        with meeting.lock:
            yield Engine.load(model, config, shard=ThreadShard(0, meeting)), meeting
    finally:
        meeting.batches.put(None)
        second.join(120)
    assert not failures
    assert not second.is_alive()
