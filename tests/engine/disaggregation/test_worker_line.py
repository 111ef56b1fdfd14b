"""What two engine processes tell each other survives the way, and nothing else can come that way."""

import json
from dataclasses import fields

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.disaggregation.worker_line import decode, encode
from engine.errors import ConfigError, OutOfMemoryError, PrefillWorkerError
from engine.kv.kv_cache import KVShape
from engine.scheduling.token_batch import ChunkGroup, Chunks, build_token_batch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_a_job_arrives_as_it_was(dtype: torch.dtype) -> None:
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=16, dtype=dtype, windows=(0, 24))
    job = ["a/folder", EngineConfig(block_size=64, dtype="bfloat16"), str(shape)]
    assert decode(encode(job)) == job


def test_a_step_arrives_as_it_was() -> None:
    chunks = Chunks()
    chunks.add(np.array([5, 6], np.int32), 3, 0, np.array([1], np.int32), 1)
    group = ChunkGroup(prefix_block_ids=np.array([0], np.int32), prefix_length=3, num_chunks=1)
    batch = build_token_batch(chunks, [group], 4)
    arrived, is_compiled = decode(encode([batch, True]))
    assert is_compiled
    for sent, found in ((batch, arrived), (batch.attention, arrived.attention)):
        for field in fields(sent):
            value = getattr(sent, field.name)
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(found, field.name), value)
                assert getattr(found, field.name).dtype == value.dtype
    assert arrived.attention.block_size == 4


@pytest.mark.parametrize("shape", [(3, 4), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_arrive_bit_by_bit(shape: tuple[int, int], dtype: torch.dtype) -> None:
    hidden = torch.randn(shape).to(dtype).t()
    arrived, layout = decode(encode([hidden, ["torch.uint8", [2, 3]]]))
    assert arrived.dtype == dtype
    assert torch.equal(arrived, hidden)
    assert layout == ["torch.uint8", [2, 3]]


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("too small"), ConfigError, "too small"),
        (torch.OutOfMemoryError("no room"), OutOfMemoryError, "OutOfMemoryError: no room"),
        (ZeroDivisionError("by 0"), PrefillWorkerError, "ZeroDivisionError: by 0"),
    ],
)
def test_an_error_arrives_as_one_that_the_caller_knows(error: Exception, kind: type[Exception], text: str) -> None:
    arrived = decode(encode(error))
    assert type(arrived) is kind
    assert str(arrived) == text


@pytest.mark.parametrize(
    "value",
    [
        {"kind": "Popen", "content": {"args": "true"}},
        {"kind": "EngineConfig", "content": {"block_size": 0}},
        {"kind": "EngineConfig", "content": {"unknown": 1}},
        {"array": "|O", "shape": [1]},
        {"array": "torch.int8", "shape": [1]},
        {"array": "torch.int64", "shape": [0]},
        {"error": "dataclass", "text": "x"},
        {"error": "no such error", "text": "x"},
        {},
    ],
)
def test_what_is_no_message_is_refused(value: object) -> None:
    head = json.dumps(value).encode()
    with pytest.raises(PrefillWorkerError, match="a message that cannot be read"):
        decode(len(head).to_bytes(8, "little") + head)
