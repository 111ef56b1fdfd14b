"""What is looked at before weights are: nothing large is fetched or converted."""

import fnmatch
import shutil
from pathlib import Path

import huggingface_hub
import pytest
from transformers import AutoTokenizer

from engine.errors import ModelError
from engine.model.loading.hub import resolve_head


@pytest.fixture
def hub(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub with the repository me/tiny, whose files can be changed; `snapshot_download` copies what is asked for."""
    files = [file.name for file in tiny_llama.iterdir()]

    def download(model: str, allow_patterns: list[str]) -> str:
        if model != "me/tiny":
            raise OSError(f"no repository {model}")
        folder = tmp_path / "snapshot"
        folder.mkdir()
        for name in files:
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                shutil.copyfile(tiny_llama / name, folder / name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda model: files)
    return files


def test_no_weights_of_a_hub_id_are_fetched(hub: list[str]) -> None:
    assert "model.safetensors" in hub
    folder = resolve_head("me/tiny")
    assert not list(folder.glob("*.safetensors*"))
    assert AutoTokenizer.from_pretrained(folder)("yes").input_ids


@pytest.mark.parametrize(
    ("model", "missing", "message"),
    [
        ("me/tiny", "model.safetensors", r"the repository holds no \*\.safetensors file"),
        ("me/tiny", "config.json", r"the repository holds no config\.json"),
        ("me/none", "", "neither a local checkpoint nor a hub id that can be fetched: no repository me/none"),
        ("./none", "", "no such file or folder"),
    ],
)
def test_what_is_no_model_is_said_before_its_weights_are_missed(
    hub: list[str], model: str, missing: str, message: str
) -> None:
    if missing:
        hub.remove(missing)
    with pytest.raises(ModelError, match=message):
        resolve_head(model)


def test_a_folder_is_itself(tiny_llama: Path) -> None:
    assert resolve_head(tiny_llama) == tiny_llama
