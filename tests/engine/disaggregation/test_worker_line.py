"""What two engine processes tell each other survives the way."""

import os
import socket
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.disaggregation.worker_line import WorkerLine
from engine.errors import ConfigError, OutOfMemoryError, PrefillWorkerError
from engine.kv.kv_cache import KVShape
from engine.scheduling.token_batch import ChunkGroup, Chunks, build_token_batch

KV_BYTES = 4096


def arrive(message: object, kv: torch.Tensor | None = None) -> tuple[Any, torch.Tensor | None]:
    """The message and the KV at the other end of a line."""
    memory_fd = os.memfd_create("kv")
    os.truncate(memory_fd, KV_BYTES)
    ours, theirs = (WorkerLine(end, memory_fd, KV_BYTES) for end in socket.socketpair())
    os.close(memory_fd)
    ours.send(message, kv)
    ours.close()
    received = theirs.receive()
    for end in (theirs, ours):  # each closes its socket then
        with pytest.raises(EOFError, match="the line is closed"):
            end.receive()
    return received


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_a_job_arrives_as_it_was(dtype: torch.dtype) -> None:
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=16, dtype=dtype, windows=(0, 24))
    job = "a/folder", EngineConfig(block_size=64, dtype="bfloat16"), shape
    assert arrive(job) == (job, None)


def test_a_step_arrives_as_it_was() -> None:
    chunks = Chunks()
    chunks.add(np.array([5, 6], np.int32), 3, 0, np.array([1], np.int32), 1)
    group = ChunkGroup(prefix_block_ids=np.array([0], np.int32), prefix_length=3, num_chunks=1)
    batch = build_token_batch(chunks, [group], 4)
    (arrived, is_compiled), _ = arrive((batch, True))
    assert is_compiled
    for sent, found in ((batch, arrived), (batch.attention, arrived.attention)):
        for field in fields(sent):
            value = getattr(sent, field.name)
            if isinstance(value, np.ndarray):
                np.testing.assert_array_equal(getattr(found, field.name), value)
                assert getattr(found, field.name).dtype == value.dtype
                assert getattr(found, field.name).flags.writeable, "as torch.from_numpy requires"
    assert arrived.attention.block_size == 4


@pytest.mark.parametrize("shape", [(3, 4), (0, 4)])
@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.int8), (torch.float16, torch.float8_e4m3fn)],
)
def test_hidden_states_and_kv_arrive_bit_by_bit(
    shape: tuple[int, int], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    hidden, kv = torch.randn(shape).to(dtype).t(), torch.randn(2, *shape).to(kv_dtype)
    arrived, arrived_kv = arrive(hidden, kv)
    assert arrived_kv is not None
    for sent, found in ((hidden, arrived), (kv, arrived_kv)):
        assert (found.dtype, found.shape) == (sent.dtype, sent.shape)
        assert torch.equal(found.float(), sent.float())


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ConfigError("too small"), ConfigError, "too small"),
        (torch.OutOfMemoryError("no room"), OutOfMemoryError, "OutOfMemoryError: no room"),
        (ZeroDivisionError("by 0"), PrefillWorkerError, "ZeroDivisionError: by 0"),
    ],
)
def test_an_error_arrives_as_one_that_the_caller_knows(error: Exception, kind: type[Exception], text: str) -> None:
    arrived, _ = arrive(error)
    assert type(arrived) is kind
    assert str(arrived) == text
