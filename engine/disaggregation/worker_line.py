"""The connection between the scheduling process and a worker that computes prompts, or one rank's share of each step.

Messages go through a socket, KV through shared memory. Messages are pickled, which would let a stranger run code here:
but the socket is one of an anonymous pair, made for a child process that this one starts from its own code, and who
could write to it could already control either process.
"""

import contextlib
import math
import mmap
import os
import pickle
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import torch

from engine.child_process import end_with_parent, start_child
from engine.errors import BatchloomError, OutOfMemoryError, PrefillWorkerError

MOST_STEPS_IN_FLIGHT = 2
"""Most steps of prompts in flight: one that is being computed, and one in the queue."""


class WorkerLine:
    """One end of the connection. Messages arrive in order; one thread may send while another receives.

    The shared memory has a region for each step in flight, used in turn: the decoding process takes the KV of a step
    before it sends the next but one. The memory is anonymous, so it is freed when both processes end, and only the
    pages that were written take memory.

    Args:
        memory_fd: of a file in memory of `num_bytes` bytes.
        num_bytes: of all regions together; a region has room for the KV of any step.
    """

    def __init__(self, connection: socket.socket, memory_fd: int, num_bytes: int) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")
        memory = torch.frombuffer(mmap.mmap(memory_fd, num_bytes), dtype=torch.uint8)
        self._regions = memory.chunk(MOST_STEPS_IN_FLIGHT)
        self._num_kv_sent = self._num_kv_received = 0

    def send(self, message: object, kv: torch.Tensor | None = None) -> None:
        """Sends a message, and KV from host memory. An exception arrives as one of `engine.errors`. Raises `OSError` if
        the other end is gone."""
        if isinstance(message, Exception) and not isinstance(message, BatchloomError):
            is_memory = isinstance(message, (MemoryError, torch.OutOfMemoryError))  # callers retry with less memory
            kind = OutOfMemoryError if is_memory else PrefillWorkerError
            message = kind(f"{type(message).__name__}: {message}")
        layout = None
        if kv is not None:
            layout = kv.dtype, kv.shape
            region = self._regions[self._num_kv_sent % MOST_STEPS_IN_FLIGHT]
            region[: kv.nbytes].view(kv.dtype).view(kv.shape).copy_(kv)
            self._num_kv_sent += 1
        payload = pickle.dumps((message, layout))
        self._connection.sendall(len(payload).to_bytes(8, "little") + payload)

    def receive(self) -> tuple[Any, torch.Tensor | None]:
        """Waits for the next message. Its KV is overwritten after MOST_STEPS_IN_FLIGHT further messages with KV. Raises
        `EOFError` or `OSError` if the other end is gone."""
        message, layout = pickle.loads(self._read(int.from_bytes(self._read(8), "little")))
        if layout is None:
            return message, None
        dtype, shape = layout
        region = self._regions[self._num_kv_received % MOST_STEPS_IN_FLIGHT]
        self._num_kv_received += 1
        return message, region[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)

    def messages(self) -> Iterator[Any]:
        """The messages, without KV, until the other end is gone."""
        with contextlib.suppress(EOFError):
            while True:
                yield self.receive()[0]

    def close(self) -> None:
        """Closes the connection; `receive` then fails at both ends."""
        with contextlib.suppress(OSError):  # the other end has closed it already
            self._connection.shutdown(socket.SHUT_RDWR)

    def _read(self, num_bytes: int) -> bytes:
        read = b""
        with contextlib.suppress(ConnectionError):
            read = self._reader.read(num_bytes)
        if len(read) < num_bytes:
            self._reader.close()
            self._connection.close()
            raise EOFError("the line is closed")
        return read


def start_worker(num_bytes: int) -> "tuple[WorkerLine, subprocess.Popen[bytes]]":
    """Starts a process of `engine.worker`; returns the line to it, with num_bytes of shared memory, and the process."""
    memory_fd = os.memfd_create("batchloom-kv")
    try:
        os.truncate(memory_fd, num_bytes)
        ours, process = start_child("engine.worker", (str(memory_fd), str(num_bytes)), pass_fds=(memory_fd,))
        return WorkerLine(ours, memory_fd, num_bytes), process
    finally:
        os.close(memory_fd)


@contextlib.contextmanager
def serve_parent(socket_fd: int, memory_fd: int, num_bytes: int) -> Iterator[WorkerLine]:
    """The line of this process to its parent, with which it ends. An error in the block is also sent to the parent.

    Args:
        socket_fd, memory_fd, num_bytes: file descriptors of socket and shared memory, and the memory's size.
    """
    line = WorkerLine(socket.socket(fileno=socket_fd), memory_fd, num_bytes)
    os.close(memory_fd)
    end_with_parent(socket_fd)
    try:
        yield line
    except Exception as error:
        with contextlib.suppress(OSError):  # the connection itself may have failed
            line.send(error)
        raise
