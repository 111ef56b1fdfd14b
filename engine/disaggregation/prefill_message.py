"""What the process that decodes and the one that computes its prompts tell each other, as bytes.

JSON with the arrays' own memory behind it: what arrives is data of the few kinds below, never code, whoever sends it.
"""

import json
import math
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
    """The first message to a worker: what it has to be like.

    Attributes:
        model: checkpoint; None where the worker has been given its own.
        config: of the engine that decodes, with nothing left to be found out but the device.
        kv_shape: of that engine's model.
    """

    model: str | None
    config: EngineConfig
    kv_shape: KVShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillStep:
    """A step of prompts to compute.

    Attributes:
        is_compiled: whether the process that decodes has compiled its layers; then the worker does so, too.
    """

    batch: TokenBatch
    is_compiled: bool


_KINDS = {kind.__name__: kind for kind in (PrefillJob, PrefillStep, EngineConfig, KVShape, TokenBatch, AttentionBatch)}
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}


def encode(message: object) -> bytes:
    """A message as bytes, for `decode`.

    Args:
        message: of the kinds above, a tensor or a dtype of floats, an exception, None, or a list of such. An
            exception that is none of `engine.errors` becomes a `CapacityError` or a `PrefillWorkerError`.
    """
    arrays: list[bytes] = []
    head = json.dumps(_to_json(message, arrays)).encode()
    return b"".join([len(head).to_bytes(8, "little"), head, *arrays])


def decode(payload: bytes) -> Any:
    """The message that `encode` has made bytes of.

    Raises:
        PrefillWorkerError: it is of none of the kinds.
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
    if type(value).__name__ in _KINDS:
        content = {field.name: _to_json(getattr(value, field.name), arrays) for field in fields(value)}
        return {"kind": type(value).__name__, "content": content}
    return value


def _describe(error: Exception) -> dict[str, str]:
    if isinstance(error, BatchloomError):
        return {"error": type(error).__name__, "text": str(error)}
    is_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError))  # which is answered with a smaller budget
    kind = CapacityError if is_memory else PrefillWorkerError
    return {"error": kind.__name__, "text": f"{type(error).__name__}: {error}"}


def _from_json(value: Any, take: Callable[[int], bytearray]) -> Any:
    """The arrays' bytes are taken in the order in which `_to_json` has put them."""
    if isinstance(value, list):
        return [_from_json(item, take) for item in value]
    if not isinstance(value, dict):
        return value
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
