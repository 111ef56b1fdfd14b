"""For which workloads a model can be used: not every one has an output layer, a tokenizer and a chat template, and it
must be the same when its answers are read."""

from pathlib import Path
from typing import TYPE_CHECKING

from engine.encoding.families import is_encoder
from engine.errors import ModelError
from engine.model.loading.checkpoint import checkpoint_digest, is_plain, read_json, resolve_checkpoint, weight_shapes

if TYPE_CHECKING:
    from tasks.workloads.workload import Workload


def check_use(workload: "Workload", checkpoint: Path) -> None:
    """Refuse a model that lacks an output layer, a tokenizer or a chat template that the workload needs."""
    model = f"model {str(checkpoint)!r}"
    if not workload.kind.is_pooled and (lack := _why_no_text(checkpoint)):
        architectures = read_json(checkpoint / "config.json").get("architectures") or ()
        has_classes = any(name.endswith("ForSequenceClassification") for name in architectures)
        uses = "modes 'embed' and, with labels = \"checkpoint\", 'score'" if has_classes else "mode 'embed'"
        what = f"mode {workload.kind.mode!r} needs a model that writes text"
        raise ModelError(f"{what}: {model} {lack}; it can be used for {uses}")
    if not any(any(checkpoint.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model")):
        raise ModelError(f"{model}: the folder holds no tokenizer, such as tokenizer.json")
    if workload.prompt.chat and not any(checkpoint.glob("*chat_template*")):
        path = checkpoint / "tokenizer_config.json"
        if not (path.is_file() and read_json(path).get("chat_template")):
            raise ModelError(f"{model} has no chat template: set chat = false in the [prompt] of {workload.name!r}")


def bind_again(workload: "Workload", model: str, model_digest: str) -> "Workload":
    """The workload bound to the model of an earlier run, if a model decides its settings.

    Args:
        model, model_digest: as in the table ``runs``.
    Raises:
        ModelError: this model is gone or has changed.
    """
    if not workload.kind.is_pooled:
        return workload
    checkpoint = resolve_checkpoint(model)
    if checkpoint_digest(checkpoint) != model_digest:
        raise ModelError(f"model {model!r} has changed since it answered workload {workload.name!r}")
    return workload.bind(checkpoint)


def _why_no_text(checkpoint: Path) -> str:
    """Why a model cannot write text; empty if it can."""
    if is_encoder(checkpoint):
        return "is an encoder"
    config = read_json(checkpoint / "config.json")
    if is_plain(config):
        names = () if config.get("tie_word_embeddings") else weight_shapes(checkpoint)
        has_head = not names or any("lm_head" in name for name in names)  # a GGUF file's folder has no names
    else:
        from engine.model.loading.stock_weights import has_output_layer  # takes seconds to import

        has_head = has_output_layer(checkpoint)
    return "" if has_head else "has no output layer: its files lack lm_head.weight"
