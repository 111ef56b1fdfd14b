"""Reads quantized safetensors files of compressed-tensors, AWQ and GPTQ for the CPU kernels."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import pad

from engine.kernels import cdiv
from engine.kernels.cpu.quantized import HALF, QuantizedColumns, grouped_kind
from engine.model.loading.checkpoint import read_json, weight_files
from engine.model.quantized.mapped_tensors import PLAIN, MappedTensor, MappedTensors, quantized_library

_CODES_AT_ONCE = 4 << 20
"""Codes of a tensor that are unpacked at the same time while they are repacked."""

_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of the code of each of eight consecutive columns in a 32-bit word of an AWQ file."""

_CODES = {"compressed-tensors": ("weight_packed", "weight"), "awq": ("qweight",), "gptq": ("qweight",)}
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16}


class GroupedWeights:
    """A checkpoint's tensors by the names of transformers' modules, as "layers.3.mlp.up_proj", "norm" or "lm_head". For
    `families` see `GgufWeights`. Raises `ModelError` if a file cannot be read."""

    families = ("gemma2", "gemma3_text", "qwen3_moe", "starcoder2")

    def __init__(self, folder: Path) -> None:
        self.file = folder
        self._config: Mapping[str, Any] = read_json(folder / "config.json")["quantization_config"]
        self._method = str(self._config["quant_method"])
        self._is_transposed = self._method != "compressed-tensors"
        self._tensors = MappedTensors()
        for file in weight_files(folder):
            self._tensors.add_safetensors(file)

    def __contains__(self, name: str) -> bool:
        """Whether the files have the weight of a module."""
        return self._codes_of(name) is not None or f"{_full(name)}.weight" in self._tensors

    @property
    def why_not_covered(self) -> str | None:
        """Why the kernels do not support the tensors; None if they do."""
        reason = {"compressed-tensors": _why_not_compressed, "awq": _why_not_awq, "gptq": _why_not_gptq}[self._method](
            self._config
        )
        if reason is not None:
            return f"{self._method} with {reason}"
        for name, tensor in self._tensors.items():
            place, _, part = name.rpartition(".")
            if part == "weight_g_idx":
                return f"{self._method} with weights out of order (g_idx)"
            codes = self._codes_of(place.removeprefix("model."))
            if part in ("weight", "bias") and tensor.format not in PLAIN and codes is not tensor:
                return f"tensor {name} has format {tensor.format}"
            if part in ("scales", "weight_scale"):
                if codes is None:
                    return f"{place} has scales without codes"
                if tensor.format not in _SCALES:
                    return f"tensor {name} has format {tensor.format}"
                (num_columns, depth), shape = self._sizes(codes), tensor.shape
                num_groups = shape[0] if self._is_transposed else shape[-1] if len(shape) == 2 else 1
                if depth % num_groups or depth // num_groups % 32:
                    return f"tensor {name} has {num_groups} scales for {depth} weights, expected one for each 32 n"
                if shape[-1 if self._is_transposed else 0] != num_columns:
                    return f"tensor {name} has shape {list(shape)}, expected {num_columns} columns"
                if codes.format == "I32" and (reason := self._why_not_zeros(place, num_columns, num_groups)):
                    return reason
                if self._is_out_of_order(place, depth, num_groups):
                    return f"{self._method} with weights out of order (g_idx)"
        return None

    @property
    def names(self) -> list[str]:
        """Names of the tensors, but for biases of zeros, which AutoGPTQ writes for layers without any."""
        named = self._tensors.items()
        return [name for name, each in named if not name.endswith(".bias") or self._tensors.raw(each).any()]

    @property
    def bytes_per_weight(self) -> float:
        """Average over the matrices."""
        num_weights = num_bytes = 0
        for name, tensor in self._tensors.items():
            place, _, part = name.rpartition(".")
            num_bytes += tensor.num_bytes
            if part in ("weight", "weight_packed", "qweight") and len(tensor.shape) == 2:
                codes = self._codes_of(place.removeprefix("model."))
                rows, columns = tensor.shape if codes is None else self._sizes(codes)
                num_weights += rows * columns
        return num_bytes / num_weights

    def vector(self, name: str, kind: str = "weight") -> torch.Tensor:
        """The weight or bias of a module, which is not quantized, in float32."""
        return self._tensors.vector(f"{_full(name)}.{kind}")

    def columns(self, name: str) -> QuantizedColumns:
        """See `MappedTensors.columns`, by the name of a module."""
        place, codes = _full(name), self._codes_of(name)
        if codes is None:
            return self._tensors.columns(f"{place}.weight")
        num_columns, depth = self._sizes(codes)
        scales = self._table(f"{place}.{'scales' if self._is_transposed else 'weight_scale'}")
        num_bits = 8 if codes.format == "I8" else 4
        zeros = self._zeros(place) if num_bits == 4 else None
        group, has_zeros = depth // scales.shape[1], zeros is not None
        kind = grouped_kind(num_bits=num_bits, has_zeros=has_zeros, group=group, dtype=scales.dtype)
        found = QuantizedColumns(quantized_library(), kind, depth=depth, num_columns=num_columns)
        raw = self._tensors.raw(codes)
        num_at_once = max(1, _CODES_AT_ONCE // (HALF * depth))
        for first in range(0, len(found.panels), num_at_once):
            some = slice(first * HALF, min(num_columns, (first + num_at_once) * HALF))
            padding = (0, 0, 0, -(some.stop - some.start) % HALF)
            found.fill_codes(
                first,
                pad(self._unpack(raw, some, num_bits), padding),
                pad(scales[some], padding),
                None if zeros is None else pad(zeros[some], padding),
            )
            self._tensors.forget(codes)
        return found

    def _codes_of(self, name: str) -> MappedTensor | None:
        for part in _CODES[self._method]:
            tensor = self._tensors.get(f"{_full(name)}.{part}")
            if tensor is not None and len(tensor.shape) == 2 and (part != "weight" or tensor.format == "I8"):
                return tensor
        return None

    def _sizes(self, codes: MappedTensor) -> tuple[int, int]:
        """Number of columns and depth of a layer."""
        rows, columns = codes.shape
        if self._method == "awq":
            return 8 * columns, rows
        if self._method == "gptq":
            return columns, 8 * rows
        return rows, columns * (1 if codes.format == "I8" else 8)

    def _table(self, name: str) -> torch.Tensor:
        """Scales ``[columns, groups]``."""
        tensor = self._tensors.find(name)
        found = torch.from_numpy(self._tensors.raw(tensor).copy()).view(_SCALES[tensor.format])
        return found.T if self._is_transposed else found.view(len(found), -1)

    def _why_not_zeros(self, place: str, num_columns: int, num_groups: int) -> str | None:
        """Why the zero points of codes of 4 bits cannot be read; None if they can, or all are the range's middle."""
        name = f"{place}.{'qzeros' if self._is_transposed else 'weight_zero_point'}"
        tensor = self._tensors.get(name)
        if tensor is None:
            groups = self._config.get("config_groups", {}).values()
            is_asymmetric = groups and all(group["weights"].get("symmetric") is False for group in groups)
            return f"there is no tensor {name}" if is_asymmetric or self._is_transposed else None
        lengths = {"I8": num_columns, "I32": cdiv(num_columns, 8)}  # one a byte, or eight columns packed in a word
        found = (tensor.shape[0], math.prod(tensor.shape[1:]))
        if (found[::-1] if self._is_transposed else found) != (lengths.get(tensor.format), num_groups):
            return f"tensor {name} has format {tensor.format} and shape {list(tensor.shape)}"
        return None

    def _is_out_of_order(self, place: str, depth: int, num_groups: int) -> bool:
        """Whether a GPTQ layer's table of groups is another than that of groups side by side; all 0 stands for none."""
        tensor = self._tensors.get(f"{place}.g_idx")
        if tensor is None:
            return False
        groups = np.frombuffer(self._tensors.raw(tensor), np.int32)
        return bool(groups.any()) and not np.array_equal(groups, np.arange(depth) // (depth // num_groups))

    def _zeros(self, place: str) -> torch.Tensor | None:
        """Zero points uint8 ``[columns, groups]`` of codes of 4 bits; None if all are the middle of the range."""
        tensor = self._tensors.get(f"{place}.{'qzeros' if self._is_transposed else 'weight_zero_point'}")
        if tensor is None:
            return None
        raw = torch.from_numpy(self._tensors.raw(tensor).copy())
        if tensor.format == "I8":  # signed, from -8 to 7
            return raw + 8
        if self._method == "gptq":  # its files have words of zero points minus one
            raw = (raw.view(torch.int32) + 0x11111111).view(torch.uint8)
        nibbles = _nibbles(raw)
        if self._method == "compressed-tensors":  # eight columns per word: [columns / 8, groups, 8]
            return nibbles.view(tensor.shape[0], tensor.shape[1], 8).permute(0, 2, 1).reshape(-1, tensor.shape[1])
        return _awq_columns(nibbles) if self._method == "awq" else nibbles.T

    def _unpack(self, raw: npt.NDArray[np.uint8], some: slice, num_bits: int) -> torch.Tensor:
        """The codes ``[columns, depth]`` of the columns `some`, from a multiple of 16 on, in the file's raw rows."""
        if self._method == "compressed-tensors":
            rows = torch.from_numpy(raw[some].copy())
            return rows if num_bits == 8 else _nibbles(rows)
        if self._method == "awq":
            return _awq_columns(_nibbles(torch.from_numpy(raw[:, some.start // 2 : some.stop // 2].copy())))
        words = torch.from_numpy(raw.reshape(len(raw), -1, 4)[:, some].copy())  # a word has eight codes along the depth
        return _nibbles(words).permute(1, 0, 2).reshape(words.shape[1], -1)


def _full(name: str) -> str:
    return name if name == "lm_head" else f"model.{name}"


def _nibbles(x: torch.Tensor) -> torch.Tensor:
    """Splits bytes into codes of 4 bits, the low bits first: uint8 ``[..., n]`` -> ``[..., 2 n]``."""
    return torch.stack([x & 15, x >> 4], dim=-1).flatten(-2)


def _awq_columns(nibbles: torch.Tensor) -> torch.Tensor:
    """Reorders the columns of an AWQ file: ``[rows, columns]`` -> ``[columns, rows]``."""
    return nibbles.view(len(nibbles), -1, 8)[:, :, list(_AWQ_NIBBLES)].flatten(1).T


def _why_not_awq(config: Mapping[str, Any]) -> str | None:
    found = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
    if found != (4, "gemm") or not config.get("zero_point", True):
        return f"{found[0]} bits, version {found[1]}, zero_point {config.get('zero_point', True)}"
    return None


def _why_not_gptq(config: Mapping[str, Any]) -> str | None:
    found = config.get("bits"), bool(config.get("desc_act")), config.get("checkpoint_format") or "gptq"
    if found != (4, False, "gptq"):
        return f"{found[0]} bits, desc_act {found[1]}, checkpoint_format {found[2]}"
    return None


def _why_not_compressed(config: Mapping[str, Any]) -> str | None:
    form, groups = config.get("format"), config.get("config_groups", {})
    if form not in ("pack-quantized", "int-quantized"):
        return f"format {form}"
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        return f"sparsity_config {sparsity}"
    if transforms := config.get("transform_config"):
        return f"transform_config {transforms}"
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        return f"config_groups {groups}"
    for group in groups.values():
        weights = group.get("weights") or {}
        if not isinstance(weights, dict):
            return f"config_groups {groups}"
        kind, num_bits, strategy = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
        is_int8 = form == "int-quantized" and num_bits == 8 and weights.get("symmetric", True)
        is_int4 = form == "pack-quantized" and num_bits == 4
        if kind != "int" or not (is_int8 or is_int4) or strategy not in ("group", "channel"):
            symmetry = "symmetric" if weights.get("symmetric", True) else "asymmetric"
            return f"format {form}, {symmetry} weights of type {kind}, {num_bits} bits, strategy {strategy}"
    return None
