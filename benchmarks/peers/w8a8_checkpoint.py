"""Writes a checkpoint with int8 weights and activations (W8A8) in compressed-tensors' format for vLLM."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SCHEME = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
    "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
}
"""One scale per row of a weight, and one per token, computed at run time."""


def write_w8a8(checkpoint: Path, scratch: Path) -> Path:
    """The folder of the model with int8 projections, made once; embedding, output layer and norms stay as they are."""
    folder = scratch / f"{checkpoint.name}-w8a8"
    if (folder / "config.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for file in checkpoint.iterdir():
        if file.suffix == ".json" and file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, folder)
    tensors: dict[str, torch.Tensor] = {}
    for shard in sorted(checkpoint.glob("*.safetensors")):
        for name, values in load_file(shard).items():
            if name.endswith("_proj.weight"):
                scale = values.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / 127
                tensors[name] = (values.float() / scale).round().to(torch.int8)
                tensors[f"{name}_scale"] = scale
            else:
                tensors[name] = values.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": SCHEME},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))  # last, since a folder with config.json counts as complete
    return folder
