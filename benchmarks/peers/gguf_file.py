"""Writes a Llama checkpoint as a GGUF file for llama.cpp, with weights rounded to the given format."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - with it, NumPy has the bfloat16 in which checkpoints are kept
import numpy as np
import numpy.typing as npt
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter, TensorNameMap, get_tensor_name_map, quants
from safetensors.numpy import load_file

KINDS = {
    "float32": GGMLQuantizationType.F32,
    "bfloat16": GGMLQuantizationType.BF16,
    "int8": GGMLQuantizationType.Q8_0,
}


def write_gguf(checkpoint: Path, file: Path, dtype: str) -> None:
    """Matrices in `dtype` ("int8" is Q8_0), norms in float32; no vocabulary, since prompts are token ids.

    Raises:
        ValueError: the model is not a Llama, or a tensor is unknown.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"only checkpoints of type 'llama' are converted, got {config['model_type']!r}")
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    partial = file.with_suffix(".partial")
    writer = GGUFWriter(partial, "llama")
    _write_shape(writer, config)
    for shard in sorted(checkpoint.glob("*.safetensors")):
        for name, values in load_file(shard).items():
            target = _name(names, name)
            if target.endswith(("attn_q.weight", "attn_k.weight")):
                values = _interleaved(values, num_heads if "attn_q" in target else num_kv_heads)
            kind = GGMLQuantizationType.F32 if values.ndim == 1 else KINDS[dtype]
            writer.add_tensor(target, quants.quantize(values.astype(np.float32), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(file)


def _write_shape(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope = config.get("rope_parameters") or config
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")


def _name(names: TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight",))
    if found is None:
        raise ValueError(f"tensor {name!r} has no place in a GGUF file of a Llama")
    return found


def _interleaved(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """Reorder rows: llama.cpp rotates neighbouring rows of a head, transformers rows half a head apart."""
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, values.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
