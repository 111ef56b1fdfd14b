"""What is looked at before weights are: nothing large is fetched or converted."""

import fnmatch
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

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
        ("me/none", "", "no such file or folder here, and the hub gives nothing: no repository me/none"),
        ("./none", "", "no such file or folder"),
        ("no\0ne", "", r"model 'no\\x00ne': no such file or folder"),
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


@pytest.fixture
def other_hub() -> Iterator[str]:
    """The URL of a hub that has one repository, me/gated, for users with access."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(403 if "gated" in self.path else 404)
            self.send_header("X-Error-Code", "GatedRepo" if "gated" in self.path else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("model", "settings", "why"),
    [
        ("me/none", {}, "the hub has no such repository, or it is private and needs HF_TOKEN"),
        ("me/gated", {}, "the hub gives it only to those with access: set HF_TOKEN"),
        ("me/none", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the Hugging Face hub cannot be reached"),
        ("none", {"HF_HUB_OFFLINE": "1"}, "the Hugging Face hub cannot be reached"),
    ],
)
def test_what_the_hub_does_not_give_is_a_plain_line(
    model: str, settings: dict[str, str], why: str, other_hub: str, tmp_path: Path
) -> None:
    """In a process of its own: huggingface_hub reads these variables when it is imported."""
    program = "import sys; from engine.model.loading.checkpoint import *; resolve_checkpoint(sys.argv[1])"
    own = {"HF_ENDPOINT": other_hub, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)} | settings
    command = [sys.executable, "-c", program, model]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    line = f"engine.errors.ModelError: model {model!r}: no such file or folder here, and {why}"
    assert done.stderr.splitlines()[-1] == line
