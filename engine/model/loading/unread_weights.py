"""Biases and norms in weight files that a model has no place for: the files are of another model than their config."""

from collections.abc import Iterable
from pathlib import Path

from engine.errors import ModelError


def refuse_unread(path: Path, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises `ModelError` for a bias of a matrix that the model reads, or a norm beside modules that it reads, which it
    does not read itself. Other tensors may be left out, such as those of further layers and of other output layers.

    Args:
        path: of the checkpoint.
        names: of the tensors in its files.
        known: names of the model's parameters, as in the files, with or without "model." in front.
    """
    read = {name.removeprefix("model.") for name in known}
    modules = {name.rpartition(".")[0] for name in read}
    places = {module.rpartition(".")[0] for module in modules}
    for name in sorted(name for name in names if name.removeprefix("model.") not in read):
        module, _, kind = name.removeprefix("model.").rpartition(".")
        is_norm = kind == "weight" and module.endswith("norm") and module.rpartition(".")[0] in places
        if is_norm or (kind == "bias" and module in modules):
            raise ModelError(f"model {str(path)!r}: its files have {name}, its configuration says nothing of it")
