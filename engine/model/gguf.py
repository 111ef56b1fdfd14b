"""GGUF files as checkpoint folders, converted once."""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from engine.errors import ModelError
from engine.model.checkpoint import cache_folder, no_progress_bars, weight_sample

_CONVERTER_VERSION = 1


def convert_gguf(file: Path) -> Path:
    """The GGUF file as a folder of float32 safetensors with its tokenizer: loading that takes a tenth of the time."""
    identity = hashlib.sha256(f"{_CONVERTER_VERSION}\0{file.stat().st_size}\0".encode() + weight_sample(file))
    target = cache_folder() / f"{file.stem}-{identity.hexdigest()[:16]}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        _convert_gguf(file, scratch)
        os.replace(scratch, target)
    except ImportError as error:
        raise ModelError(
            f"model {str(file)!r}: reading GGUF files needs `pip install 'batchloom[gguf]'`: {error}"
        ) from error
    except OSError as error:
        if not (target / "config.json").is_file():  # else another process converted it meanwhile
            raise ModelError(f"model {str(file)!r}: cannot be converted: {error}") from error
    except Exception as error:  # the parsers raise whatever a damaged file leads them to
        raise ModelError(f"model {str(file)!r}: not a readable GGUF file: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _convert_gguf(file: Path, folder: Path) -> None:
    import torch
    import transformers

    # Newer transformers keep GGUF weights packed unless told otherwise; older ones always unpack them.
    unpack = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    # GGUF holds weights of 4 to 8 bits with scales; float32 keeps each product of the two exactly enough for parity.
    with no_progress_bars():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, **unpack
        )
        model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
