"""The line between the process that schedules and one that computes steps for it: prompts, or a rank's share.

Messages go through a socket, KV through memory that both processes map. A message is JSON followed by the bytes of its
arrays, so what arrives is data of the few kinds below, never code.
"""

import contextlib
import json
import math
import mmap
import socket
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from engine import errors
from engine.config import EngineConfig
from engine.errors import BatchloomError, CapacityError, PrefillWorkerError
from engine.kernels.attention_batch import AttentionBatch
from engine.kv.kv_cache import KVShape
from engine.scheduling.token_batch import TokenBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob:
    """The first message to a worker: what to load and how to compute.

    Attributes:
        model: checkpoint.
        config: of the engine that decodes, with what "auto" means filled in, and the worker's device.
        kv_shape: of that engine's model.
    """

    model: str
    config: EngineConfig
    kv_shape: KVShape


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStep:
    """A step to compute.

    Attributes:
        is_compiled: whether the layers are compiled in the process that decodes; the worker's are then, too.
    """

    batch: TokenBatch
    is_compiled: bool = False


MOST_STEPS_UNDER_WAY = 2
"""Steps of prompts that are sent and not answered yet: one that is computed, and one that waits for its turn."""

_KINDS = {kind.__name__: kind for kind in (PrefillJob, WorkerStep, EngineConfig, KVShape, TokenBatch, AttentionBatch)}
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def encode(message: object) -> bytes:
    """A message as bytes, for `decode`.

    Args:
        message: one of the kinds above, a tensor or a dtype of floats, an exception, None, a list or tuple of these. An
            exception that is not of `engine.errors` becomes a `CapacityError` or a `PrefillWorkerError`.
    """
    arrays: list[bytes] = []
    head = json.dumps(_to_json(message, arrays)).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *arrays])


def decode(payload: bytes) -> Any:
    """The message that `encode` was given.

    Raises:
        PrefillWorkerError: the bytes are not a message of these kinds.
    """
    start = 8 + int.from_bytes(payload[:8], "little")

    def take(num_bytes: int) -> bytearray:
        nonlocal start
        start += num_bytes
        return bytearray(payload[start - num_bytes : start])  # writable, as tensors want it

    try:
        return _from_json(json.loads(payload[8:start]), take)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise PrefillWorkerError(f"a message that cannot be read: {error!r}") from error


def _to_json(value: Any, arrays: list[bytes]) -> Any:
    if isinstance(value, np.ndarray):
        arrays.append(value.tobytes())
        return {"array": value.dtype.str, "shape": value.shape}
    if isinstance(value, torch.Tensor):
        arrays.append(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return {"tensor": str(value.dtype), "shape": tuple(value.shape)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value)}
    if isinstance(value, Exception):
        return _describe(value)
    if isinstance(value, list):
        return [_to_json(item, arrays) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_to_json(item, arrays) for item in value]}
    if type(value).__name__ in _KINDS:
        content = {field.name: _to_json(getattr(value, field.name), arrays) for field in fields(value)}
        return {"kind": type(value).__name__, "content": content}
    return value


def _describe(error: Exception) -> dict[str, str]:
    if isinstance(error, BatchloomError):
        return {"error": type(error).__name__, "text": str(error)}
    is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))  # callers answer it with a smaller budget
    kind = CapacityError if is_memory else PrefillWorkerError
    return {"error": kind.__name__, "text": f"{type(error).__name__}: {error}"}


def _from_json(value: Any, take: Callable[[int], bytearray]) -> Any:
    """Takes the arrays' bytes in the order in which `_to_json` wrote them."""
    if isinstance(value, list):
        return [_from_json(item, take) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_from_json(item, take) for item in value["tuple"])
    if "array" in value:
        whole = np.dtype(value["array"])
        if whole.kind not in "iu":
            raise ValueError(f"an array of {whole}")
        return np.frombuffer(take(whole.itemsize * math.prod(value["shape"])), dtype=whole).reshape(value["shape"])
    if "tensor" in value:
        dtype = _DTYPES[value["tensor"]]
        shape = [int(size) for size in value["shape"]]
        taken = take(dtype.itemsize * math.prod(shape))
        return torch.frombuffer(taken, dtype=dtype).view(shape) if taken else torch.empty(shape, dtype=dtype)
    if "dtype" in value:
        return _DTYPES[value["dtype"]]
    if "error" in value:
        kind = getattr(errors, value["error"])
        if not (isinstance(kind, type) and issubclass(kind, BatchloomError)):
            raise ValueError(f"an error of the kind {kind!r}")
        return kind(value["text"])
    return _KINDS[value["kind"]](**{name: _from_json(item, take) for name, item in value["content"].items()})


class WorkerLine:
    """One end of the line. Messages arrive in order; one thread may send while another receives.

    The shared memory has a region for each step under way, used in turn: the process that decodes takes the KV of a
    step before it sends the next but one. The memory has no name, so it ends with the two processes; the system maps
    only the pages that some step has needed.

    Args:
        connection: connected stream socket.
        memory_fd: of a file in memory of `num_bytes` bytes.
        num_bytes: of all regions together; each holds the KV of any one step.
    """

    def __init__(self, connection: socket.socket, memory_fd: int, num_bytes: int) -> None:
        self._connection = connection
        self._reader = connection.makefile("rb")
        memory = torch.frombuffer(mmap.mmap(memory_fd, num_bytes), dtype=torch.uint8)
        self._regions = memory.chunk(MOST_STEPS_UNDER_WAY)
        self._num_kv_sent = self._num_kv_received = 0

    def send(self, message: object, kv: torch.Tensor | None = None) -> None:
        """Sends a message, and KV in host memory.

        Raises:
            OSError: the other end is gone.
        """
        layout = None
        if kv is not None:
            layout = [kv.dtype, list(kv.shape)]
            region = self._regions[self._num_kv_sent % MOST_STEPS_UNDER_WAY]
            region[: kv.nbytes].view(kv.dtype).view(kv.shape).copy_(kv)
            self._num_kv_sent += 1
        payload = encode([message, layout])
        self._connection.sendall(len(payload).to_bytes(8, "little") + payload)

    def receive(self) -> tuple[Any, torch.Tensor | None]:
        """Waits for the next message. Its KV may be overwritten MOST_STEPS_UNDER_WAY messages with KV later.

        Raises:
            EOFError, OSError: the other end is gone.
        """
        message, layout = decode(self._read(int.from_bytes(self._read(8), "little")))
        if layout is None:
            return message, None
        dtype, shape = layout
        region = self._regions[self._num_kv_received % MOST_STEPS_UNDER_WAY]
        self._num_kv_received += 1
        return message, region[: dtype.itemsize * math.prod(shape)].view(dtype).view(shape)

    def close(self) -> None:
        """Ends the line; `receive` fails at both ends."""
        with contextlib.suppress(OSError):  # the other end was faster
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
