"""Tensors of memory-mapped weight files; their pages are released once they have been read."""

import ctypes
import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ModelError
from engine.kernels.cpu.native_build import load_library
from engine.kernels.cpu.quantized import HALF, KINDS, PLAIN_KIND, QuantizedColumns, element_type
from engine.model.loading.checkpoint import cache_folder

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Formats that are not quantized."""

_BYTES_AT_ONCE = 4 << 20
"""Bytes of a tensor that are repacked at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedTensor:
    """The location of a tensor: the index of the mapped file, format and offset there, and its shape, rows first."""

    file: int
    format: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class MappedTensors(dict[str, MappedTensor]):
    """The tensors of one or several files, by name."""

    def __init__(self) -> None:
        super().__init__()
        self._maps: list[mmap.mmap] = []
        self._files: list[Path] = []

    def add(self, file: Path, tensors: dict[str, dict[str, Any]]) -> None:
        """Maps a file, which has tensors with these formats, shapes, offsets and num_bytes, by name. Raises
        `ModelError` if it cannot be read, or ends before a tensor does."""
        try:
            with file.open("rb") as stream:
                self._maps.append(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise ModelError(f"model {str(file)!r}: cannot be read: {error}") from error
        self._files.append(file)
        end = max((tensor["offset"] + tensor["num_bytes"] for tensor in tensors.values()), default=0)
        if len(self._maps[-1]) < end:
            raise ModelError(f"model {str(file)!r}: has {len(self._maps[-1])} bytes, its tensors end at {end}")
        for name, tensor in tensors.items():
            shape = tuple(tensor["shape"])
            self[name] = MappedTensor(file=len(self._maps) - 1, **tensor | {"shape": shape})

    def add_safetensors(self, file: Path) -> None:
        """Maps a safetensors file. Raises `ModelError` if its header cannot be read; or as `add`."""
        try:
            with file.open("rb") as stream:
                header_bytes = int.from_bytes(stream.read(8), "little")
                header = json.loads(stream.read(min(header_bytes, file.stat().st_size)))
            start = 8 + header_bytes
            tensors = {
                name: {
                    "format": given["dtype"],
                    "shape": given["shape"],
                    "offset": start + given["data_offsets"][0],
                    "num_bytes": given["data_offsets"][1] - given["data_offsets"][0],
                }
                for name, given in header.items()
                if name != "__metadata__"
            }
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelError(f"model {str(file)!r}: not a readable safetensors file: {error}") from error
        self.add(file, tensors)

    def find(self, name: str) -> MappedTensor:
        """A tensor by name; raises `ModelError` if there is none."""
        if name not in self:
            raise ModelError(f"model {str(self._files[0])!r}: lacks the tensor {name}")
        return self[name]

    def raw(self, tensor: MappedTensor) -> npt.NDArray[np.uint8]:
        """The bytes ``[rows, bytes of a row]`` in the mapped file; a vector has rows of one number."""
        flat = np.frombuffer(self._maps[tensor.file], np.uint8, tensor.num_bytes, tensor.offset)
        return flat.reshape(math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0], -1)

    def forget(self, tensor: MappedTensor) -> None:
        """Releases the pages of a tensor; they would be read from the file again."""
        start = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, start, tensor.offset + tensor.num_bytes - start)

    def vector(self, name: str) -> torch.Tensor:
        """A tensor that is not quantized, in float32, flattened."""
        tensor = self.find(name)
        return torch.from_numpy(self.raw(tensor).copy()).view(PLAIN[tensor.format]).float().flatten()

    def columns(self, name: str, order: npt.NDArray[np.int64] | None = None) -> QuantizedColumns:
        """Repacks a matrix in one of `KINDS`, or in one of `PLAIN`, which is converted to what products compute in.

        Args:
            name: of the tensor, whose rows are output columns.
            order: for each output column its row in the file; None: all rows in the file's order.
        """
        tensor = self.find(name)
        library = quantized_library()
        raw, dtype = self.raw(tensor), element_type(library)
        num_columns, depth = len(raw) if order is None else len(order), tensor.shape[-1]
        kind = KINDS.get(tensor.format, PLAIN_KIND)
        found = QuantizedColumns(library, kind, depth=depth, num_columns=num_columns)
        rows = np.full(len(found.panels) * HALF, -1, dtype=np.int64)
        rows[:num_columns] = np.arange(num_columns) if order is None else order
        num_at_once = max(1, _BYTES_AT_ONCE // (HALF * raw.shape[1]))
        for first in range(0, len(found.panels), num_at_once):
            piece = rows[first * HALF : (first + num_at_once) * HALF]
            if tensor.format in PLAIN and dtype != PLAIN[tensor.format]:
                found.fill(first, *_converted(piece, raw, PLAIN[tensor.format], dtype))
            else:
                found.fill(first, piece, raw)
            self.forget(tensor)
        return found


def quantized_library() -> ctypes.CDLL:
    """The functions of quantized.cpp for this machine. Raises `NativeBuildError` as `load_library`."""
    return load_library(cache_folder(), "quantized")


def _converted(
    rows: npt.NDArray[np.int64], raw: npt.NDArray[np.uint8], from_dtype: torch.dtype, dtype: torch.dtype
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Converts the given rows to a dtype; returns their indices in the result, -1 unchanged, and the bytes."""
    used = torch.from_numpy(raw[np.maximum(rows, 0)]).view(from_dtype).to(dtype)
    return np.where(rows < 0, -1, np.arange(len(rows))), used.view(torch.uint8).numpy()
