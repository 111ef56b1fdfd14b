"""Loads a stock transformers model, for the compared engines and for the referee."""

import torch
import transformers

from benchmarks.peers.protocol import LoadSettings


def load_stock_model(settings: LoadSettings, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The checkpoint in this number format, on the device of the settings."""
    torch.set_num_threads(settings.num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=dtype, local_files_only=True)
    return model.to(settings.device).eval()
