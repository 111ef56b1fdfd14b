"""GGUF files of tiny models in any format, and the same weights unpacked."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from transformers import AutoConfig, AutoModelForCausalLM

from engine.model.loading.checkpoint import TOKENIZER_FILES
from engine.model.loading.gguf import write_tensor_table

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "starcoder2": gguf.MODEL_ARCH.STARCODER2,
}

HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Of blocks that the gguf package does not write: where their scales lie."""


def random_rows(kind: str, num_rows: int, depth: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """``[rows, bytes]``: any codes, with scales that give weights of about 0.1."""
    block_depth, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if kind not in HALVES:
        weights = rng.normal(size=(num_rows, depth), scale=0.1).astype(np.float32)
        return np.asarray(gguf.quantize(weights, GGMLQuantizationType[kind])).view(np.uint8)
    blocks = rng.integers(0, 256, (num_rows, depth // block_depth, block_bytes), dtype=np.uint8)
    scale = 0.0002 if kind == "Q6_K" else 0.0003
    for at in HALVES[kind]:
        halves = rng.uniform(0.2 * scale, scale, (*blocks.shape[:2], 1)).astype(np.float16)
        blocks[:, :, at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(num_rows, -1)


def unpacked(rows: npt.NDArray[np.uint8], kind: str) -> npt.NDArray[np.float32]:
    return np.asarray(gguf.dequantize(rows, GGMLQuantizationType[kind]))


def write_shaped(checkpoint: Path, folder: Path) -> Path:
    """A tiny checkpoint of the same family whose sizes are multiples of 256, as blocks of weights want them."""
    config = AutoConfig.from_pretrained(checkpoint)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config.update({"hidden_size": 256, "intermediate_size": 512, "vocab_size": 500, **heads})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data.normal_(std=0.1).add_(parameter.data.mean().round())
    model.save_pretrained(folder)
    for file in checkpoint.glob("token*"):
        shutil.copy(file, folder)
    return folder


def write_quantized(
    checkpoint: Path, folder: Path, kinds: dict[str, str], *, has_plain: bool = True
) -> tuple[Path, Path]:
    """A checkpoint as a GGUF file with its folder, and a checkpoint of the same weights in float32.

    Matrices get random weights of their format; each file follows the conventions of its architecture.

    Args:
        checkpoint: of an architecture of `ARCHITECTURES`.
        folder: where both are made.
        kinds: a format for each part of a tensor's name in the file; the last that fits counts.
        has_plain: whether the second one gets its weights.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    opened, plain = folder / "opened", folder / "plain"
    for made in (opened, plain):
        made.mkdir()
        for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
            if (checkpoint / name).is_file():
                shutil.copy(checkpoint / name, made)
    writer = gguf.GGUFWriter(folder / "model.gguf", gguf.MODEL_ARCH_NAMES[arch])
    rng = np.random.default_rng(3)
    for name, parameter in sorted(model.named_parameters()):
        for piece, values in _pieces(name, parameter.detach().numpy()):
            target = names.get_name(piece, try_suffixes=(".weight", ".bias"))
            assert target is not None
            if values.ndim == 1 or "ffn_gate_inp" in target:
                added = 1 if config.model_type.startswith("gemma") and target.endswith("norm.weight") else 0
                writer.add_tensor(target, (values + added).astype(np.float32))
                continue
            kind = [kind for part, kind in kinds.items() if part in target][-1]
            rows = values.reshape(-1, values.shape[-1])
            raw = random_rows(kind, *rows.shape, rng) if kind != "F16" else rows.astype(np.float16)
            writer.add_tensor(target, raw.reshape(*values.shape[:-1], -1), raw_dtype=GGMLQuantizationType[kind])
            if not has_plain:
                continue
            kept = unpacked(raw, kind) if kind != "F16" else raw.astype(np.float32)
            if arch == gguf.MODEL_ARCH.LLAMA and target.endswith(("attn_q.weight", "attn_k.weight")):
                kept = kept.reshape(-1, config.head_dim // 2, 2, rows.shape[1]).swapaxes(1, 2)
            values[:] = kept.reshape(values.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_tensor_table(folder / "model.gguf", opened)
    if has_plain:
        model.save_pretrained(plain)
    return opened, plain


def _pieces(name: str, values: npt.NDArray[np.float32]) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """The tensors of a file that a parameter becomes, by transformers' names; gate and up of experts lie apart."""
    if not name.endswith("experts.gate_up_proj"):
        yield f"{name}.weight" if name.endswith("experts.down_proj") else name, values
        return
    for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
        yield f"{name.replace('gate_up', part)}.weight", half
