"""A benchmark's model: its folder, and its sizes without loading it."""

from pathlib import Path

from engine.model.loading.checkpoint import read_json, resolve_checkpoint
from engine.model.loading.gguf import unpack_gguf
from engine.model.model_shape import ModelShape


def find_model(name: str | Path | None = None) -> Path:
    """The checkpoint folder of a model, of the demo's if none is named; a GGUF file is converted once."""
    if name is None:
        from flows.demo import find_demo_model  # imports the flows

        name = find_demo_model()
    return unpack_gguf(resolve_checkpoint(name))


def read_model_shape(folder: Path, dtype: str) -> ModelShape:
    """Sizes of the checkpoint's model when it computes in `dtype`."""
    return ModelShape.from_config(read_json(folder / "config.json"), dtype=dtype)
