"""The connection between the scheduling process and a worker that computes prompts, or one rank's share of each step.

Messages go through a socket, KV through shared memory. A message is JSON followed by the bytes of its arrays: only data
of the few kinds below can be received, never code.
"""

import contextlib
import io
import json
import math
import mmap
import os
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from engine import errors
from engine.child_process import end_with_parent, start_child
from engine.config import EngineConfig
from engine.errors import BatchloomError, OutOfMemoryError, PrefillWorkerError
from engine.kernels.attention_batch import AttentionBatch
from engine.scheduling.token_batch import TokenBatch

MOST_STEPS_IN_FLIGHT = 2
"""Most steps of prompts in flight: one that is being computed, and one in the queue."""

_KINDS = {kind.__name__: kind for kind in (EngineConfig, TokenBatch, AttentionBatch)}
_ARRAY_DTYPES = (np.dtype(np.int32), np.dtype(np.int64))
_HIDDEN_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_KV_DTYPES = (torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_DTYPES: dict[str, Any] = {str(dtype): dtype for dtype in (*_ARRAY_DTYPES, *_HIDDEN_DTYPES, *_KV_DTYPES)}


def encode(message: object) -> bytes:
    """A message as bytes, for `decode`: one of the kinds above, a tensor, an exception, a plain value, or a list of
    these; a tuple arrives as a list. Exceptions not of `engine.errors` become `OutOfMemoryError` or
    `PrefillWorkerError`."""
    arrays: list[bytes] = []
    head = json.dumps(_to_json(message, arrays)).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *arrays])


def decode(payload: bytes) -> Any:
    """The message of a payload made by `encode`. Raises `PrefillWorkerError` if the bytes hold anything else."""
    stream = io.BytesIO(payload)
    num_bytes = int.from_bytes(stream.read(8), "little")
    try:
        return _from_json(json.loads(stream.read(num_bytes)), stream)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise PrefillWorkerError(f"a message that cannot be read: {error!r}") from error


def _to_json(value: Any, arrays: list[bytes]) -> Any:
    if isinstance(value, (np.ndarray, torch.Tensor)):
        head = {"array": str(value.dtype), "shape": [*value.shape]}
        if isinstance(value, torch.Tensor):
            value = value.contiguous().view(-1).view(torch.uint8).numpy()
        arrays.append(value.tobytes())
        return head
    if isinstance(value, Exception):
        if isinstance(value, BatchloomError):
            return {"error": type(value).__name__, "text": str(value)}
        is_memory = isinstance(value, (MemoryError, torch.OutOfMemoryError))  # callers retry with a smaller budget
        kind = OutOfMemoryError if is_memory else PrefillWorkerError
        return {"error": kind.__name__, "text": f"{type(value).__name__}: {value}"}
    if isinstance(value, (list, tuple)):
        return [_to_json(item, arrays) for item in value]
    if type(value).__name__ in _KINDS:
        content = {field.name: _to_json(getattr(value, field.name), arrays) for field in fields(value)}
        return {"kind": type(value).__name__, "content": content}
    return value


def _from_json(value: Any, arrays: io.BytesIO) -> Any:
    """Reads the arrays' bytes in the order in which `_to_json` wrote them."""
    if isinstance(value, list):
        return [_from_json(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "array" in value:
        dtype, shape = _DTYPES[value["array"]], value["shape"]
        content = bytearray(arrays.read(dtype.itemsize * math.prod(shape)))  # writable, as torch.from_numpy requires
        whole = np.frombuffer(content, dtype=np.uint8)
        if isinstance(dtype, np.dtype):
            return whole.view(dtype).reshape(shape)
        return torch.from_numpy(whole).view(dtype).view(shape)
    if "error" in value:
        kind = getattr(errors, value["error"])
        if not (isinstance(kind, type) and issubclass(kind, BatchloomError)):
            raise ValueError(f"an error of the kind {kind!r}")
        return kind(value["text"])
    return _KINDS[value["kind"]](**{name: _from_json(item, arrays) for name, item in value["content"].items()})


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
        """Sends a message, and KV from host memory. Raises `OSError` if the other end is gone."""
        layout = None
        if kv is not None:
            layout = [str(kv.dtype), list(kv.shape)]
            region = self._regions[self._num_kv_sent % MOST_STEPS_IN_FLIGHT]
            region[: kv.nbytes].view(kv.dtype).view(kv.shape).copy_(kv)
            self._num_kv_sent += 1
        payload = encode([message, layout])
        self._connection.sendall(len(payload).to_bytes(8, "little") + payload)

    def receive(self) -> tuple[Any, torch.Tensor | None]:
        """Waits for the next message. Its KV is overwritten after MOST_STEPS_IN_FLIGHT further messages with KV. Raises
        `EOFError` or `OSError` if the other end is gone."""
        message, layout = decode(self._read(int.from_bytes(self._read(8), "little")))
        if layout is None:
            return message, None
        dtype, shape = _DTYPES[layout[0]], layout[1]
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
