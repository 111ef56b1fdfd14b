"""Weight files of another model than their config.json says: they lack weights, some have another shape, or the model
has no place for a bias or a norm."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model.loading.config_sizes import read_size


def refuse_missing(names: Collection[str], folder: Path) -> None:
    """Raises `ModelError` if a checkpoint's files lack weights of these names."""
    if names:
        raise ModelError(f"model {str(folder)!r}: its files lack {len(names)} weights, {min(names)} first")


def refuse_other(
    folder: Path, sizes: Mapping[str, Any], stored: Mapping[str, Sequence[int]], expected: Mapping[str, Sequence[str]]
) -> None:
    """Raises `ModelError` if a plain checkpoint's query heads cannot share its KV heads, or its files lack a weight, or
    one has another shape; or as `refuse_unread`.

    Args:
        sizes: values of its config.json, by the names in `expected`.
        stored, expected: names of tensors, to their shapes in the files and to the names of these sizes.
    """
    num_q_heads = read_size(sizes, "num_attention_heads")
    if num_q_heads % read_size(sizes, "num_key_value_heads", num_q_heads):
        raise ModelError(f"model {str(folder)!r}: config.json: {num_q_heads} heads are no multiple of its KV heads")
    missing = expected.keys() - stored.keys()
    if missing and sizes.get("attention_bias") and all(name.endswith("bias") for name in missing):
        why = f"config.json says attention_bias {sizes['attention_bias']!r}, its files have no {min(missing)}"
        raise ModelError(f"model {str(folder)!r}: {why}")
    refuse_missing(missing, folder)
    for name, named in expected.items():
        if [*stored[name]] != [read_size(sizes, each) for each in named]:
            says = ", ".join(f"{each} {sizes[each]}" for each in named)
            what = f"config.json says {says}; the weight {name} has the shape {[*stored[name]]}"
            raise ModelError(f"model {str(folder)!r}: {what}")
    refuse_unread(folder, stored, expected)


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
