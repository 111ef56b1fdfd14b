"""Tensors of a GGUF file, read through a memory map and repacked for the CPU kernels piece by piece."""

import ctypes
import json
import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ModelError
from engine.kernels.cpu.quantized import FORMATS, HALF, QuantizedColumns
from engine.model.checkpoint import GGUF_TENSORS

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BYTES_AT_ONCE = 4 << 20
"""Of a tensor that are in memory twice, in the file's order and repacked."""

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Modules of a layer by transformers' names, and what GGUF files call them."""


class GgufWeights:
    """A GGUF file's tensors by the names of transformers' modules, as "layers.3.mlp.up_proj", "norm" or "lm_head".

    Args:
        folder: of `engine.model.gguf.open_gguf`.
        num_layers: of the model.
    Raises:
        ModelError: the file is not there any more, or is another one.
    """

    def __init__(self, folder: Path, num_layers: int) -> None:
        table = json.loads((folder / GGUF_TENSORS).read_text())
        self.file, self._tensors = Path(table["file"]), table["tensors"]
        self._names = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
        for index in range(num_layers):
            self._names |= {f"layers.{index}.{name}": f"blk.{index}.{given}" for name, given in _NAMES.items()}
        try:
            with self.file.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"model {str(self.file)!r}: cannot be read: {error}") from error
        end = max(tensor["offset"] + tensor["num_bytes"] for tensor in self._tensors.values())
        if len(self._map) < end:
            raise ModelError(f"model {str(self.file)!r}: has {len(self._map)} bytes, its tensors end at {end}")

    def __contains__(self, name: str) -> bool:
        """Whether there is a weight of this name."""
        return f"{self._names[name]}.weight" in self._tensors

    @property
    def why_not_covered(self) -> str | None:
        """What keeps the tensors from being computed as they are; None: nothing does."""
        for name, tensor in self._tensors.items():
            is_matrix = len(tensor["shape"]) == 2
            if tensor["format"] not in ({**FORMATS, **_PLAIN} if is_matrix else _PLAIN):
                return f"tensor {name} has format {tensor['format']}"
        return None

    @property
    def bytes_per_weight(self) -> float:
        """Of the matrices on average."""
        matrices = [tensor for tensor in self._tensors.values() if len(tensor["shape"]) == 2]
        num_weights = sum(math.prod(tensor["shape"]) for tensor in matrices)
        return float(sum(tensor["num_bytes"] for tensor in matrices) / num_weights)

    def vector(self, name: str, kind: str = "weight") -> torch.Tensor:
        """A norm's weight, or a bias, in bfloat16.

        Args:
            name: of the module.
            kind: "weight" or "bias".
        """
        tensor = self._find(f"{self._names[name]}.{kind}")
        raw = np.frombuffer(self._map, np.uint8, tensor["num_bytes"], tensor["offset"])
        return torch.from_numpy(raw.copy()).view(_PLAIN[tensor["format"]]).bfloat16()

    def columns(self, library: ctypes.CDLL, name: str, order: npt.NDArray[np.int64] | None = None) -> QuantizedColumns:
        """The weight of a linear layer or of a table of embeddings.

        Args:
            library: of the kernels.
            name: of the module.
            order: the row of the file that each column is; None: as they come.
        """
        tensor = self._find(f"{self._names[name]}.weight")
        num_columns, depth = tensor["shape"]
        kind = "BF16" if tensor["format"] in _PLAIN else tensor["format"]
        found = QuantizedColumns(kind, depth=depth, num_columns=num_columns)
        rows = np.full(len(found.panels) * HALF, -1, dtype=np.int64)
        rows[:num_columns] = np.arange(num_columns) if order is None else order
        raw = np.frombuffer(self._map, np.uint8, tensor["num_bytes"], tensor["offset"]).reshape(num_columns, -1)
        num_at_once = max(1, _BYTES_AT_ONCE // (HALF * raw.shape[1]))
        for first in range(0, len(found.panels), num_at_once):
            piece = rows[first * HALF : (first + num_at_once) * HALF]
            if tensor["format"] == kind:
                found.fill(library, first, piece, raw)
            else:
                found.fill(library, first, *_in_bf16(piece, raw, _PLAIN[tensor["format"]]))
            self._forget(tensor)
        return found

    def _find(self, name: str) -> Mapping[str, Any]:
        if name not in self._tensors:
            raise ModelError(f"model {str(self.file)!r}: lacks the tensor {name}")
        found: Mapping[str, Any] = self._tensors[name]
        return found

    def _forget(self, tensor: Mapping[str, Any]) -> None:
        """Gives the pages of a tensor back; what is read again comes from the file."""
        start = tensor["offset"] // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_DONTNEED, start, tensor["offset"] + tensor["num_bytes"] - start)


def _in_bf16(
    rows: npt.NDArray[np.int64], raw: npt.NDArray[np.uint8], dtype: torch.dtype
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
    """Rows of floats in bfloat16, and their numbers among themselves."""
    used = torch.from_numpy(raw[np.maximum(rows, 0)]).view(dtype).bfloat16()
    return np.where(rows < 0, -1, np.arange(len(rows))), used.view(torch.uint8).numpy()
