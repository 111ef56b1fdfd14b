"""GGUF files as checkpoint folders: configuration and tokenizer, made once; weights stay in the file."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model.loading.checkpoint import GGUF_TENSORS, cache_folder, weight_sample

_CONVERTER_VERSION = 2


def open_gguf(file: Path) -> Path:
    """A checkpoint folder for a GGUF file, kept in the cache folder, with no weights but where they lie.

    Raises:
        ModelError: the file cannot be read.
    """
    file = file.resolve()
    identity = hashlib.sha256(f"{_CONVERTER_VERSION}\0{file}\0{file.stat().st_size}\0".encode() + weight_sample(file))
    target = cache_folder() / f"{file.stem}-{identity.hexdigest()[:16]}"
    return _made_once(file, target, _write_folder)


def unpack_gguf(folder: Path) -> Path:
    """The same folder with weights in float32 safetensors, made once: loading that takes a tenth of the time.

    Args:
        folder: of `open_gguf`; any other folder is returned as it is.
    Raises:
        ModelError: the file cannot be read.
    """
    if not (folder / GGUF_TENSORS).is_file():
        return folder
    return _made_once(gguf_file(folder), folder.with_name(f"{folder.name}-float32"), _write_unpacked)


def gguf_file(folder: Path) -> Path:
    """The GGUF file of a folder of `open_gguf`."""
    return Path(json.loads((folder / GGUF_TENSORS).read_text())["file"])


def write_tensor_table(file: Path, folder: Path) -> None:
    """Writes where each tensor of a GGUF file lies: name, format, shape with the rows first, offset and bytes."""
    from gguf import GGUFReader

    tensors = {
        tensor.name: {
            "format": tensor.tensor_type.name,
            "shape": [int(size) for size in reversed(tensor.shape)],
            "offset": int(tensor.data_offset),
            "num_bytes": int(tensor.n_bytes),
        }
        for tensor in GGUFReader(file).tensors
    }
    (folder / GGUF_TENSORS).write_text(json.dumps({"file": str(file), "tensors": tensors}, indent=1))


def _made_once(file: Path, target: Path, write: Callable[[Path, Path], None]) -> Path:
    """`write(file, folder)` into a folder that appears whole."""
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=".converting-"))
    try:
        write(file, scratch)
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


def _write_folder(file: Path, folder: Path) -> None:
    import transformers

    write_tensor_table(file, folder)
    source: dict[str, Any] = {"gguf_file": file.name}
    from engine.model.loading.stock_weights import no_progress_bars

    with no_progress_bars():
        config = transformers.AutoConfig.from_pretrained(file.parent, **source)
        transformers.AutoTokenizer.from_pretrained(file.parent, **source).save_pretrained(folder)
    config.save_pretrained(folder)
    transformers.GenerationConfig.from_model_config(config).save_pretrained(folder)


def _write_unpacked(file: Path, folder: Path) -> None:
    import torch
    import transformers

    # Newer transformers keep GGUF weights packed unless told otherwise; older ones always unpack them.
    unpack = (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
    # GGUF holds weights of 4 to 8 bits with scales; float32 keeps each product of the two exactly enough for parity.
    from engine.model.loading.stock_weights import no_progress_bars

    with no_progress_bars():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32, **unpack
        )
        model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
