"""Llama 3's scaling of rotary frequencies, for a longer context than that of its first training."""

import math
from typing import Any

import torch


def scale(frequencies: torch.Tensor, rope: dict[str, Any]) -> torch.Tensor:
    """Divides low frequencies by `factor`, keeps high ones, and interpolates between them."""
    context = rope["original_max_position_embeddings"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    wavelengths = 2 * math.pi / frequencies
    kept = ((context / wavelengths - low) / (high - low)).clamp(0, 1)
    scaled: torch.Tensor = (1 - kept) * frequencies / rope["factor"] + kept * frequencies
    return scaled
