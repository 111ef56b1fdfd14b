"""Reads the tensors of a GGUF file for the CPU kernels."""

import ctypes
import json
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.kernels.cpu.quantized import QuantizedColumns
from engine.kernels.cpu.quantized_formats import FORMATS
from engine.model.loading.checkpoint import GGUF_TENSORS
from engine.model.quantized.mapped_tensors import PLAIN, MappedTensors

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
"""Modules of a layer: transformers' names, and those in GGUF files."""


class GgufWeights:
    """A GGUF file's tensors by the names of transformers' modules, as "layers.3.mlp.up_proj", "norm" or "lm_head". The
    folder is from `engine.model.loading.gguf.open_gguf`. Raises `ModelError` if the file cannot be read, or is shorter
    than its table of tensors says."""

    def __init__(self, folder: Path) -> None:
        table = json.loads((folder / GGUF_TENSORS).read_text())
        self.file = Path(table["file"])
        self._tensors = MappedTensors()
        self._tensors.add(self.file, table["tensors"])

    def __contains__(self, name: str) -> bool:
        """Whether the file has the weight of a module."""
        return f"{_gguf_name(name)}.weight" in self._tensors

    @property
    def why_not_covered(self) -> str | None:
        """Why the kernels do not support the tensors; None if they do."""
        for name, tensor in self._tensors.items():
            if tensor.format not in ({**FORMATS, **PLAIN} if len(tensor.shape) == 2 else PLAIN):
                return f"tensor {name} has format {tensor.format}"
        return None

    @property
    def bytes_per_weight(self) -> float:
        """Average over the matrices."""
        matrices = [tensor for _, tensor in self._tensors.items() if len(tensor.shape) == 2]
        return sum(tensor.num_bytes for tensor in matrices) / sum(math.prod(tensor.shape) for tensor in matrices)

    def vector(self, name: str, kind: str = "weight") -> torch.Tensor:
        """The weight or bias of a module, which is not quantized, in bfloat16."""
        return self._tensors.vector(f"{_gguf_name(name)}.{kind}")

    def columns(self, library: ctypes.CDLL, name: str, order: npt.NDArray[np.int64] | None = None) -> QuantizedColumns:
        """See `MappedTensors.columns`, by the name of a module."""
        return self._tensors.columns(library, f"{_gguf_name(name)}.weight", order)


def _gguf_name(name: str) -> str:
    if name.startswith("layers."):
        _, index, module = name.split(".", 2)
        return f"blk.{index}.{_NAMES[module]}"
    return {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[name]
