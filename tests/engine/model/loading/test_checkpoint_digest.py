"""A checkpoint with other weights is another model: each of its tensors is in its digest."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.model.loading.checkpoint import GGUF_TENSORS, checkpoint_digest, read_end_tokens, resolve_checkpoint

TENSORS, TENSOR_BYTES = [f"layer.{number}.weight" for number in range(100)], 1 << 17


def change(file: Path, start: int) -> None:
    """Writes other values over a tensor."""
    with file.open("r+b") as stream:
        stream.seek(start)
        stream.write(bytes(range(256)) * (TENSOR_BYTES // 256))


def test_each_changed_tensor_makes_another_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensors = {name: torch.zeros(TENSOR_BYTES // 4) for name in TENSORS}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file, {"format": "pt"})
    digests = {checkpoint_digest(tmp_path)}
    start = file.stat().st_size - len(TENSORS) * TENSOR_BYTES
    for number in range(len(TENSORS)):
        change(file, start + number * TENSOR_BYTES)
        digests.add(checkpoint_digest(tmp_path))
    assert len(digests) == 1 + len(TENSORS)


@pytest.mark.parametrize("first", ["", "1", '"a"', "1e999", str(10**30), str(-(10**30))])
def test_a_file_with_a_damaged_header_has_a_digest(first: str, tmp_path: Path) -> None:
    header = f'{{"a": {{"data_offsets": [{first}]}}}}'.encode() if first else b"[1]"
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert checkpoint_digest(tmp_path)


def test_each_changed_tensor_makes_another_gguf_file(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(bytes(100 + len(TENSORS) * TENSOR_BYTES))
    table = {name: {"offset": 100 + number * TENSOR_BYTES} for number, name in enumerate(TENSORS)}
    (tmp_path / GGUF_TENSORS).write_text(json.dumps({"file": str(file), "tensors": table}))
    digests = {checkpoint_digest(tmp_path)}
    for number in range(len(TENSORS)):
        change(file, 100 + number * TENSOR_BYTES)
        digests.add(checkpoint_digest(tmp_path))
    assert len(digests) == 1 + len(TENSORS)


def test_a_gguf_file_that_was_changed_in_place_is_converted_again(smollm2_gguf: Path, tmp_path: Path) -> None:
    """Also where its size and its samples are as before, as after a change of one number of its header."""
    file = Path(shutil.copy(smollm2_gguf, tmp_path))
    before = resolve_checkpoint(file)
    content = bytearray(file.read_bytes())
    key = b"tokenizer.ggml.eos_token_id"
    place = content.index(key) + len(key) + 4
    content[place : place + 4] = (5).to_bytes(4, "little")
    file.write_bytes(content)
    assert read_end_tokens(before) == [0, 2]
    assert read_end_tokens(resolve_checkpoint(file)) == [0, 2, 5]
