"""LoRA adapters as peft saves them, with random factors, and what peft makes of a model with one."""

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

TARGETS = ("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj")


def save_adapter(
    checkpoint: Path, folder: Path, seed: int = 1, kind: Any = AutoModelForCausalLM, **config: Any
) -> Path:
    """Saves an adapter of a checkpoint's model whose updates change every answer."""
    import peft  # here, since each process of the tests collects all of them, and it takes two seconds

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):  # of peft about its own calls
        torch.manual_seed(seed)
        model = kind.from_pretrained(checkpoint, dtype=torch.float32)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "target_modules": list(TARGETS)} | config))
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.3)
        wrapped.save_pretrained(folder)
    return folder


def merged_by_peft(checkpoint: Path, adapter: Path, kind: Any = AutoModelForCausalLM) -> PreTrainedModel:
    """The checkpoint's model in float32 with the adapter in its weights."""
    import peft

    model = kind.from_pretrained(checkpoint, dtype=torch.float32)
    with warnings.catch_warnings(action="ignore"):
        return peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
