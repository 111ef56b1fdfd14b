"""What is looked at before weights are: nothing large is fetched or converted."""

import fnmatch
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from transformers import AutoTokenizer

from engine.errors import ModelError
from engine.model.loading.checkpoint import resolve_checkpoint
from engine.model.loading.hub import resolve_head


@pytest.fixture
def hub(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub with the repository me/tiny, whose files can be changed; `snapshot_download` copies what is asked for."""
    files = [file.name for file in tiny_llama.iterdir()]

    def download(model: str, revision: None, allow_patterns: list[str]) -> str:
        if model != "me/tiny":
            raise OSError(f"no repository {model}")
        folder = tmp_path / "snapshot"
        folder.mkdir()
        for name in files:
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                shutil.copyfile(tiny_llama / name, folder / name)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda model, revision: files)
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
        ("me/tiny@", "", "model 'me/tiny@': no revision follows the @"),
        ("a/folder/me@home", "", "no such file or folder$"),
    ],
)
def test_what_is_no_model_is_said_before_its_weights_are_missed(
    hub: list[str], model: str, missing: str, message: str
) -> None:
    if missing:
        hub.remove(missing)
    with pytest.raises(ModelError, match=message):
        resolve_head(model)


def test_a_folder_is_itself(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("me").mkdir()
    Path("me/tiny@v1").symlink_to(tiny_llama)
    assert resolve_head(tiny_llama) == tiny_llama
    assert resolve_head("me/tiny@v1") == Path("me/tiny@v1")
    assert resolve_checkpoint("me/tiny@v1") == Path("me/tiny@v1")


COMMITS = {"main": "b" * 40, "release/v1": "a" * 40}
"""Of me/tiny: branch or tag to commit. The older commit has no generation_config.json."""


@pytest.fixture
def other_hub(tiny_llama: Path) -> Iterator[str]:
    """The URL of a hub with the repository me/tiny, in two revisions, and me/gated, for users with access."""

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            what, _, rest = path.removeprefix("/api/models").removeprefix("/me/tiny/").partition("/")
            commit = COMMITS.get(rest, rest[:40])
            if not path.removeprefix("/api/models").startswith("/me/tiny/"):
                self.refuse(*((403, "GatedRepo") if "gated" in path else (404, "RepoNotFound")))
            elif commit not in COMMITS.values():
                self.refuse(404, "RevisionNotFound")
            elif what == "revision":
                self.answer(json.dumps({"id": "me/tiny", "sha": commit, "siblings": []}).encode())
            elif what == "tree":
                hidden = "" if commit == COMMITS["main"] else "generation_config.json"
                files = [file for file in tiny_llama.iterdir() if file.name != hidden]
                entries = [{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f.name} for f in files]
                self.answer(json.dumps(entries).encode())
            else:
                self.answer((tiny_llama / rest[41:]).read_bytes(), commit)

        do_HEAD = do_GET

        def answer(self, content: bytes, commit: str = "") -> None:
            self.send_response(200)
            self.send_header("ETag", sha256(content).hexdigest())
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content if self.command == "GET" else b"")

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
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
        ("me/tiny@v9", {}, "its repository has no such revision: name a branch, a tag or a whole commit hash"),
        ("me/none", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "the Hugging Face hub cannot be reached"),
        ("none", {"HF_HUB_OFFLINE": "1"}, "the Hugging Face hub cannot be reached"),
    ],
)
def test_what_the_hub_does_not_give_is_a_plain_line(
    model: str, settings: dict[str, str], why: str, other_hub: str, tmp_path: Path
) -> None:
    done = resolve_apart({"HF_ENDPOINT": other_hub, "HF_HOME": str(tmp_path)} | settings, model)
    line = f"engine.errors.ModelError: model {model!r}: no such file or folder here, and {why}"
    assert done.stderr.splitlines()[-1] == line


@pytest.mark.parametrize("revision", ["release/v1", "a" * 40])
def test_a_revision_of_a_repository_is_fetched(revision: str, other_hub: str, tmp_path: Path) -> None:
    settings = {"HF_ENDPOINT": other_hub, "HF_HOME": str(tmp_path)}
    asked = (f"me/tiny@{revision}", "resolve_head"), (f"me/tiny@{revision}",), ("me/tiny",)
    head, pinned, newest = (Path(resolve_apart(settings, *each).stdout.strip()) for each in asked)
    assert head.name == pinned.name == COMMITS["release/v1"]
    assert newest.name == COMMITS["main"]
    assert (newest / "generation_config.json").is_file()
    assert not (pinned / "generation_config.json").exists()
    offline = resolve_apart(settings | {"HF_HUB_OFFLINE": "1"}, f"me/tiny@{revision}")
    assert Path(offline.stdout.strip()) == pinned


def resolve_apart(
    settings: dict[str, str], model: str, function: str = "resolve_checkpoint"
) -> subprocess.CompletedProcess[str]:
    """The outcome of a process that prints a model's folder: huggingface_hub reads settings when it is imported."""
    program = "import sys; from engine.model.loading.hub import *; print(globals()[sys.argv[2]](sys.argv[1]))"
    own = {"HF_HUB_OFFLINE": "0", **settings}
    command = [sys.executable, "-c", program, model, function]
    return subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
