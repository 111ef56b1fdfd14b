"""A workload is refused before any work where the model cannot answer it; the error says what the model is for."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from engine.errors import ModelError
from tasks.workloads.workload import load_workload
from tests.tiny_encoders import save_encoder


@pytest.mark.parametrize("family", ["bert", "nomic_bert", "distilbert"])
@pytest.mark.parametrize(
    ("num_classes", "use"), [(0, "mode 'embed'"), (2, "modes 'embed' and, with labels = \"checkpoint\", 'score'")]
)
def test_an_encoder_writes_no_text(family: str, num_classes: int, use: str, tmp_path: Path) -> None:
    folder = save_encoder(family, tmp_path / "encoder", num_classes=num_classes)
    for name in ("snippets", "ranking", "facts", "facets"):
        workload = load_workload(name)
        what = f"{str(folder)!r} is an encoder; it can be used for {use}"
        expected = f"mode {workload.kind.mode!r} needs a model that writes text: model {what}"
        with pytest.raises(ModelError, match=f"^{re.escape(expected)}$"):
            workload.bind(folder)
    assert load_workload("embeddings").bind(folder).kind.is_pooled


@pytest.mark.parametrize("family", ["mistral", "phi"])
def test_a_decoder_without_output_layer_writes_no_text(
    family: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(tiny_checkpoint("mistral"), folder)
    load_workload("ranking").bind(folder)
    if family == "phi":
        sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
        config = transformers.PhiConfig(vocab_size=512, **sizes)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        load_workload("ranking").bind(folder)
    transformers.AutoModel.from_pretrained(folder).save_pretrained(folder)
    with pytest.raises(ModelError, match=r"files lack lm_head\.weight; it can be used for mode 'embed'$"):
        load_workload("ranking").bind(folder)


@pytest.mark.parametrize("name", ["ranking", "embeddings"])
def test_a_tokenizer_is_looked_for(name: str, tiny_llama: Path, tmp_path: Path) -> None:
    """Its template alone is none."""
    shutil.copytree(tiny_llama, tmp_path / "model", ignore=shutil.ignore_patterns("token*"))
    with pytest.raises(ModelError, match=r"model '.*': the folder holds no tokenizer, such as tokenizer\.json"):
        load_workload(name).bind(tmp_path / "model")


def test_a_chat_template_is_looked_for(tiny_llama: Path, tmp_path: Path) -> None:
    """Where transformers of any release keeps it; an empty one is none."""
    folder, workload = tmp_path / "model", load_workload("ranking")
    shutil.copytree(tiny_llama, folder)
    workload.bind(folder)
    (folder / "chat_template.jinja").rename(tmp_path / "kept")
    said = r"model '.*' has no chat template: set chat = false in the \[prompt\] of 'ranking'"
    for config in ({}, {"chat_template": None}):
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=said):
            workload.bind(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match=said):
        workload.bind(folder)
    load_workload("embeddings").bind(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    workload.bind(folder)
