"""The classes that a checkpoint has a classification head for, as its config.json names them."""

from dataclasses import dataclass
from pathlib import Path

from engine.errors import ModelError
from engine.model.loading.checkpoint import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLabels:
    """The classes of a `...ForSequenceClassification` checkpoint: their names in the order of the head's outputs, one
    where the output is a score. With `is_exclusive` a text has one class; else classes are independent."""

    names: tuple[str, ...]
    is_exclusive: bool

    @classmethod
    def read(cls, folder: Path) -> "ClassLabels":
        """The classes of a checkpoint; raises `ModelError` where it has no classification head."""
        config = read_json(folder / "config.json")
        if not any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
            raise ModelError(
                f"{folder}: the checkpoint has no classification head; its architectures are "
                f"{config.get('architectures')}, and one that ends with ForSequenceClassification is needed"
            )
        named = config.get("id2label") or {n: f"LABEL_{n}" for n in range(config.get("num_labels") or 2)}
        names = tuple(str(named[key]) for key in sorted(named, key=int))
        is_exclusive = len(names) > 1 and config.get("problem_type") != "multi_label_classification"
        return cls(names=names, is_exclusive=is_exclusive)

    def check_head(self, folder: Path, num_outputs: int) -> None:
        """Raises `ModelError` if the head of the checkpoint in the folder has more or fewer outputs than classes."""
        if num_outputs != len(self.names):
            what = f"config.json names {len(self.names)} classes, the classification head has {num_outputs} outputs"
            raise ModelError(f"model {str(folder)!r}: {what}")
