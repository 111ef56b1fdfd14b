"""Weight files: what is read of them before there is work, and that none of it stays once the weights are packed."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine import Engine, EngineConfig
from engine.errors import ModelError
from engine.model.loading.checkpoint import resolve_checkpoint


def list_mapped(folder: Path) -> list[str]:
    """The lines of this process's memory map that name a file of the folder."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_files_are_not_mapped_once_a_model_is_loaded(
    family: str, dtype: str, tiny_checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """With the output layer tied to the embedding, and with one of its own."""
    import transformers

    folder = tmp_path / "model"
    stored = "float32" if dtype == "float32" else "bfloat16"  # what is converted is never mapped
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family), dtype=stored)
    model.save_pretrained(folder)
    engine = Engine.load(str(folder), EngineConfig(dtype=dtype, device="cpu", kv_memory_bytes=1 << 20))
    assert list_mapped(folder) == []
    assert engine.config.dtype == dtype


def test_a_gguf_file_whose_configuration_cannot_be_kept_names_the_setting(
    smollm2_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATCHLOOM_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"file/cache, which cannot be written \(Not a dir.*folder in BATCHLOOM_CACHE"):
        resolve_checkpoint(smollm2_gguf)


def test_a_gguf_file_is_checked_without_torch(smollm2_gguf: Path) -> None:
    """A night with nothing new to do ends before it would be imported."""
    folder = resolve_checkpoint(smollm2_gguf)
    check = (
        "import sys; from pathlib import Path; from engine.config import EngineConfig;"
        "from engine.limits import check_weights;"
        f"check_weights(EngineConfig(), Path({str(folder)!r}));"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", check], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
