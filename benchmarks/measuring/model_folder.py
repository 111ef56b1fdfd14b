"""The sizes of a checkpoint's model, read without loading it."""

import json
from pathlib import Path

from engine.model.model_shape import ModelShape


def read_model_shape(folder: Path, dtype: str) -> ModelShape:
    """Sizes of the checkpoint's model when it computes in `dtype`."""
    return ModelShape.from_config(json.loads((folder / "config.json").read_text()), dtype=dtype)
