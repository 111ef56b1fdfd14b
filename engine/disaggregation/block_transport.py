"""How two processes hand over KV blocks: through shared memory on one host, or through torch.distributed."""

import contextlib
import mmap
import select
import socket
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from engine.disaggregation.prefill_message import decode, encode

MOST_STEPS_UNDER_WAY = 2
"""Steps of prompts that are sent and not answered yet: one that is computed, and one that waits for its turn."""


class BlockTransport(Protocol):
    """One end of a line to one other process. Messages arrive in order; sending and receiving may be two threads."""

    def send(self, message: object, kv: torch.Tensor | None = None) -> None:
        """Sends a message of `engine.disaggregation.prefill_message`, and KV in host memory.

        Raises:
            OSError, RuntimeError: the other end is gone.
        """

    def receive(self) -> tuple[Any, torch.Tensor | None]:
        """Waits for the next message. Its KV may be overwritten MOST_STEPS_UNDER_WAY messages with KV later.

        Raises:
            EOFError, OSError, RuntimeError: the other end is gone.
        """

    def close(self) -> None:
        """Ends the line; `receive` fails at both ends, or ends with a last message None."""


class SharedMemoryTransport:
    """Messages through a socket, KV through memory that both processes map.

    The memory has a region for each step under way, used in turn: whoever sends prompts waits for the KV of a step
    before it sends the next but one. It has no name and ends with the two processes, however they end; pages that no
    step has needed are never taken.

    Args:
        line: connected stream socket.
        memory_fd: of a file in memory of `num_bytes` bytes.
        num_bytes: for all regions; each holds the KV of any one step.
    """

    def __init__(self, line: socket.socket, memory_fd: int, num_bytes: int) -> None:
        self._line = line
        self._reader = line.makefile("rb")
        memory = torch.frombuffer(mmap.mmap(memory_fd, num_bytes), dtype=torch.uint8)
        self._regions = memory.chunk(MOST_STEPS_UNDER_WAY)
        self._num_kv_sent = self._num_kv_received = 0

    def send(self, message: object, kv: torch.Tensor | None = None) -> None:
        layout = None
        if kv is not None:
            layout = [kv.dtype, list(kv.shape)]
            region = self._regions[self._num_kv_sent % MOST_STEPS_UNDER_WAY]
            region[: kv.nbytes].view(kv.dtype).view(kv.shape).copy_(kv)
            self._num_kv_sent += 1
        payload = encode([message, layout])
        self._line.sendall(len(payload).to_bytes(8, "little") + payload)

    def receive(self) -> tuple[Any, torch.Tensor | None]:
        message, layout = decode(self._read(int.from_bytes(self._read(8), "little")))
        if layout is None:
            return message, None
        dtype, shape = layout
        region = self._regions[self._num_kv_received % MOST_STEPS_UNDER_WAY]
        self._num_kv_received += 1
        return message, region[: dtype.itemsize * int(np.prod(shape))].view(dtype).view(shape)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the other end was faster
            self._line.shutdown(socket.SHUT_RDWR)

    def wait_for_hangup(self) -> None:
        """Returns when the other end is closed, whether anybody receives or not."""
        poll = select.poll()
        poll.register(self._line, select.POLLRDHUP)
        poll.poll()

    def _read(self, num_bytes: int) -> bytes:
        read = b""
        with contextlib.suppress(ConnectionError):
            read = self._reader.read(num_bytes)
        if len(read) < num_bytes:
            self._reader.close()
            self._line.close()
            raise EOFError("the line is closed")
        return read


class DistributedTransport:
    """Messages and KV through a torch.distributed process group on the CPU, such as gloo.

    Args:
        peer: rank of the other process in the default group.
    """

    def __init__(self, peer: int) -> None:
        self._peer = peer

    def send(self, message: object, kv: torch.Tensor | None = None) -> None:
        layout = None if kv is None else [kv.dtype, list(kv.shape)]
        payload = torch.from_numpy(np.frombuffer(encode([message, layout]), dtype=np.uint8).copy())
        dist.send(torch.tensor([len(payload)]), self._peer)
        dist.send(payload, self._peer)
        if kv is not None:
            dist.send(_as_bytes(kv), self._peer)

    def receive(self) -> tuple[Any, torch.Tensor | None]:
        num_bytes = torch.zeros(1, dtype=torch.int64)
        dist.recv(num_bytes, self._peer)
        payload = torch.empty(int(num_bytes), dtype=torch.uint8)
        dist.recv(payload, self._peer)
        message, layout = decode(payload.numpy().tobytes())
        if layout is None:
            return message, None
        dtype, shape = layout
        kv = torch.empty(shape, dtype=dtype)
        dist.recv(_as_bytes(kv), self._peer)
        return message, kv

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the other end is gone already
            self.send(None)


def _as_bytes(kv: torch.Tensor) -> torch.Tensor:
    """The tensor's own memory as bytes: not every format of numbers can be sent."""
    return kv.contiguous().view(-1).view(torch.uint8)
