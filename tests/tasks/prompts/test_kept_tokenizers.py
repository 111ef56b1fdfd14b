"""The plain form in which a checkpoint's tokenizer is kept: read instead of it, the same, and quickly."""

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.errors import ModelError
from engine.model.loading.checkpoint import checkpoint_digest
from engine.model.loading.hub import SMALL_FILES
from tasks.prompts import text_codec
from tasks.prompts.text_codec import TextCodec, load_tokenizer

MESSAGES = [{"role": "user", "content": "the fox?"}]
TEXTS = ["The night watchman", "  <|im_end|> le veilleur\n", "夜警は 0 1 2"]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHLOOM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


def read(folder: Path) -> list[Any]:
    """What is made of it: prompts, ids, text."""
    tokenizer = load_tokenizer(folder)
    codec = TextCodec(tokenizer.backend_tokenizer, tokenizer)
    ids = codec.encode([codec.trust(text) for text in TEXTS], add_special_tokens=True)
    chat = codec.render_chat(MESSAGES) if codec.has_chat_template else None
    return [chat, ids, codec.encode(TEXTS, add_special_tokens=False), [codec.decode(each) for each in ids]]


@pytest.mark.parametrize("which", ["tiny_llama", "thinking_checkpoint", "minilm"])
def test_the_copy_is_read_and_gives_the_same(
    which: str, request: pytest.FixtureRequest, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(which)
    expected = read(folder)
    (copy,) = cache.iterdir()
    monkeypatch.setattr(transformers, "AutoTokenizer", None)  # whoever asks it fails
    assert read(folder) == expected
    copy.write_text("{")
    monkeypatch.undo()
    monkeypatch.setenv("BATCHLOOM_CACHE", str(cache.parent))
    assert read(folder) == expected, "a damaged copy costs time alone"
    assert json.loads(copy.read_text()), "and is made again"


def test_a_tokenizer_whose_library_panics_is_refused(tiny_llama: Path, cache: Path, tmp_path: Path) -> None:
    """Python does not take a panic for an `Exception`."""
    for file in tiny_llama.glob("token*"):
        shutil.copy(file, tmp_path)
    values = json.loads((tmp_path / "tokenizer.json").read_text())
    values["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match=r"its tokenizer cannot be read from .*: PanicException: Precompiled: "):
        load_tokenizer(tmp_path)


def test_another_chat_template_is_another_tokenizer(tiny_llama: Path, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    first = read(folder)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert read(folder)[0] == "the fox?!"
    assert read(folder)[1:] == first[1:]
    assert len(list(cache.iterdir())) == 2


def save_tekken(folder: Path, shift: int) -> Path:
    """A checkpoint with Mistral's file for a tokenizer alone: which byte is the first piece."""
    pieces = [bytes([(first + shift) % 256]) for first in range(256)]
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(piece).decode()} for rank, piece in enumerate(pieces)]
    control = [{"rank": rank, "token_str": text} for rank, text in enumerate(("<unk>", "<s>", "</s>"))]
    sizes = {"num_vocab_tokens": 256, "default_vocab_size": 259, "default_num_special_tokens": len(control)}
    settings = {"pattern": r"\p{L}+|\P{L}+", "version": "v3", **sizes}
    folder.mkdir()
    (folder / "tekken.json").write_text(json.dumps({"config": settings, "vocab": vocab, "special_tokens": control}))
    (folder / "config.json").write_text('{"model_type": "mistral"}')
    return folder


def test_another_tekken_file_is_another_tokenizer(cache: Path, tmp_path: Path) -> None:
    first, second = (save_tekken(tmp_path / str(shift), shift) for shift in (0, 100))
    assert read(first)[2] != read(second)[2]
    assert checkpoint_digest(first) != checkpoint_digest(second)
    assert "tekken.json" in SMALL_FILES, "it is fetched from a hub"


def test_what_a_copy_would_lose_is_not_kept(tiny_llama: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = text_codec._build
    monkeypatch.setattr(text_codec, "_build", lambda parts: build(parts | {"chat_template": "lost"}))
    read(tiny_llama)
    assert not cache.exists()


def test_a_night_without_room_for_the_copy_goes_on(tiny_llama: Path, cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    assert read(tiny_llama)[0]


def test_reading_the_copy_imports_no_torch(tiny_llama: Path, cache: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from tasks.prompts.text_codec import TextCodec;"
        f"print(TextCodec.load(Path({str(tiny_llama)!r})).render_chat({MESSAGES!r}), 'torch' in sys.modules)"
    )
    shown = read(tiny_llama)[0]
    assert cache.exists(), "this process has made the copy"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert said == f"{shown} False\n"
