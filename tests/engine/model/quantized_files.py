"""GGUF files of tiny models in any format, and the same weights unpacked."""

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.model.loading.checkpoint import TOKENIZER_FILES
from engine.model.loading.gguf import write_tensor_table

HALVES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Of blocks that the gguf package does not write: where their scales lie."""


def random_rows(kind: str, num_rows: int, depth: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """``[rows, bytes]``: any codes, with scales that give weights of about 0.1."""
    block_depth, block_bytes = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    if kind not in HALVES:
        weights = rng.normal(size=(num_rows, depth), scale=0.1).astype(np.float32)
        return np.asarray(gguf.quantize(weights, GGMLQuantizationType[kind]))
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

    Matrices get random weights of their format. Query and key rows are in the order of GGUF files of Llama.

    Args:
        checkpoint: of family llama, qwen2 or qwen3.
        folder: where both are made.
        kinds: a format for each part of a tensor's name in the file; the last that fits counts.
        has_plain: whether the second one gets its weights.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    names = gguf.get_tensor_name_map(
        {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}[
            config["model_type"]
        ],
        config["num_hidden_layers"],
    )
    opened, plain = folder / "opened", folder / "plain"
    for made in (opened, plain):
        made.mkdir()
        for name in ("config.json", "generation_config.json", *TOKENIZER_FILES):
            if (checkpoint / name).is_file():
                shutil.copy(checkpoint / name, made)
    writer = gguf.GGUFWriter(folder / "model.gguf", config["model_type"])
    rng, kept = np.random.default_rng(3), {}
    for name, values in load_file(checkpoint / "model.safetensors").items():
        target = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert target is not None
        kept[name] = values
        if values.ndim == 1:
            writer.add_tensor(target, values.astype(np.float32))
            continue
        kind = [kind for part, kind in kinds.items() if part in target][-1]
        raw = random_rows(kind, *values.shape, rng) if kind != "F16" else values.astype(np.float16)
        writer.add_tensor(target, raw, raw_dtype=GGMLQuantizationType[kind])
        if not has_plain:
            continue
        kept[name] = unpacked(raw, kind) if kind != "F16" else raw.astype(np.float32)
        if config["model_type"] == "llama" and target.endswith(("attn_q.weight", "attn_k.weight")):
            kept[name] = kept[name].reshape(-1, config["head_dim"] // 2, 2, values.shape[1]).swapaxes(1, 2)
            kept[name] = np.ascontiguousarray(kept[name].reshape(values.shape))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_tensor_table(folder / "model.gguf", opened)
    if has_plain:
        save_file(kept, plain / "model.safetensors", metadata={"format": "pt"})
    return opened, plain
