"""Reads the tensors of a GGUF file for the CPU kernels."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.cpu.quantized import KINDS, QuantizedColumns
from engine.model.loading.checkpoint import GGUF_TENSORS, read_json
from engine.model.loading.gguf_names import NAMES, NAMES_OF_GEMMA, gguf_name
from engine.model.quantized.mapped_tensors import PLAIN, MappedTensors


class GgufWeights:
    """The tensors of a folder from `open_gguf` by the names of transformers' modules, as "layers.3.mlp.up_proj", "norm"
    or "lm_head". `families` have more operations than Llama's, and are read here. Raises `ModelError` if the file
    cannot be read, or is shorter than its table of tensors says."""

    families = ("gemma2", "gemma3_text", "phi3", "qwen3_moe", "starcoder2")

    def __init__(self, folder: Path) -> None:
        config, table = read_json(folder / "config.json"), read_json(folder / GGUF_TENSORS)
        kind = config["model_type"]
        self._names = NAMES | (NAMES_OF_GEMMA if kind.startswith("gemma") else {})
        self._norm_offset = 1.0 if kind.startswith("gemma") else 0.0  # added to the weights of norms in the file
        # Of query and key heads whose two halves the file has interleaved.
        self._permuted_dim = _head_dim(config) if kind == "llama" else 0
        self.file = Path(table["file"])
        self._tensors = MappedTensors()
        self._tensors.add(self.file, table["tensors"])

    def __contains__(self, name: str) -> bool:
        """Whether the file has the weight of a module."""
        return f"{self._name(name)}.weight" in self._tensors

    @property
    def why_not_covered(self) -> str | None:
        """Why the kernels do not support the tensors; None if they do."""
        for name, tensor in self._tensors.items():
            is_matrix = len(tensor.shape) > 1 and "ffn_gate_inp" not in name
            if tensor.format not in ({*KINDS, *PLAIN} if is_matrix else PLAIN):
                return f"tensor {name} has format {tensor.format}"
        return None

    @property
    def bytes_per_weight(self) -> float:
        """Average over the matrices."""
        matrices = [tensor for _, tensor in self._tensors.items() if len(tensor.shape) > 1]
        return sum(tensor.num_bytes for tensor in matrices) / sum(math.prod(tensor.shape) for tensor in matrices)

    def vector(self, name: str, kind: str = "weight") -> torch.Tensor:
        """The weight or bias of a module, which is not quantized, in float32, flattened."""
        found = self._tensors.vector(f"{self._name(name)}.{kind}")
        if self._is_permuted(name):
            found = found[_permuted_rows(len(found), self._permuted_dim)]
        return found - self._norm_offset if name.endswith("norm") else found

    def columns(self, name: str) -> QuantizedColumns:
        """See `MappedTensors.columns`, by the name of a module; the rows of all experts are one matrix."""
        place = f"{self._name(name)}.weight"
        num_rows = self._tensors.find(place).shape[0]
        order = _permuted_rows(num_rows, self._permuted_dim) if self._is_permuted(name) else None
        return self._tensors.columns(place, order)

    def _is_permuted(self, name: str) -> bool:
        return self._permuted_dim > 0 and name.endswith(("q_proj", "k_proj"))

    def _name(self, name: str) -> str:
        return gguf_name(name, self._names)


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _permuted_rows(num_rows: int, head_dim: int) -> npt.NDArray[np.int64]:
    """The file's row of each row in transformers' order: GGUF files interleave the two halves of Llama's heads."""
    return np.arange(num_rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel().astype(np.int64)
