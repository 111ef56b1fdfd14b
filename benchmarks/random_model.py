"""A checkpoint of random weights, to measure speed:  python -m benchmarks.random_model FOLDER [--shape llama-3-8b]

It is written shard by shard in bfloat16 from a fixed seed, so a large model needs memory for one layer only. Its
answers mean nothing, but all engines must give the same ones.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "max_position_embeddings": 8192,
        "rope_theta": 500000.0, "tie_word_embeddings": True,
    },
    "medium": {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 8192,
        "rope_theta": 500000.0, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 2048,
        "rope_theta": 10000.0, "tie_word_embeddings": True,
    },
}  # fmt: skip


def write_checkpoint(folder: Path, shape: dict[str, Any]) -> None:
    """Write config.json and safetensors shards, one for what is not in a layer and one per layer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(shape), indent=1))
    index: dict[str, str] = {}
    for number, tensors in enumerate(_shards(shape)):
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def model_config(shape: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model of this shape."""
    shared = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "dtype": "bfloat16"}
    rope = {"rope_parameters": {"rope_theta": shape["rope_theta"], "rope_type": "default"}}
    ends = {"rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False, "mlp_bias": False}
    return shared | shape | rope | ends


def make_model(shape: dict[str, Any], device: str | torch.device, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """A model of this shape with random weights, made on the device instead of loaded."""
    config = transformers.LlamaConfig(
        **{key: value for key, value in model_config(shape).items() if key not in ("model_type", "dtype")}
    )
    with torch.device(device):
        return transformers.LlamaForCausalLM._from_config(config, dtype=dtype).eval()


def _shards(shape: dict[str, Any]) -> Iterator[dict[str, torch.Tensor]]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(17)

    def make(parameter: torch.nn.Parameter) -> torch.Tensor:
        if parameter.ndim == 1:  # of a norm
            return torch.ones(parameter.shape, dtype=torch.bfloat16)
        # This spread keeps the size of a row through the layers; else logits would be nearly equal, with many ties.
        values = torch.randn(parameter.shape, generator=generator, device=device) * parameter.shape[1] ** -0.5
        return values.bfloat16().cpu()

    def layer(named: tuple[str, torch.nn.Parameter]) -> int:
        return int(named[0].split(".")[2]) if ".layers." in named[0] else -1

    model = make_model(shape, "meta", torch.bfloat16)
    for _, shard in groupby(sorted(model.named_parameters(), key=layer), key=layer):
        yield {name: make(parameter) for name, parameter in shard}


def main(command_line: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3-8b")
    arguments = parser.parse_args(command_line)
    write_checkpoint(arguments.folder, SHAPES[arguments.shape])
    return 0


if __name__ == "__main__":
    sys.exit(main())
