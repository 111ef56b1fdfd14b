"""Draws of the CPU kernels are those of the plain implementation, which sorts each row."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.cpu.native import NativeBackend
from engine.kernels.draw import draw_tokens
from engine.model.loading.checkpoint import cache_folder
from tests.engine.kernels.random_rows import is_a_close_call, make_hard_rows, make_rows


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    shape = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 16, "block_size": 32}
    return NativeBackend(**shape, dtype=torch.float32, folder=cache_folder())


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 31, 1000, 1025, 5000]), st.booleans())
def test_native_draws_are_the_plain_ones(native: NativeBackend, seed: int, vocab_size: int, has_ties: bool) -> None:
    logits, settings = make_rows(seed, 24, vocab_size, has_ties=has_ties)
    expected, found = draw_tokens(logits, settings), native.draw_tokens(logits, settings)
    for row in (expected != found).nonzero().flatten().tolist():
        assert is_a_close_call(logits[row], settings[row], int(found[row])), (row, settings[row])
    assert torch.equal(found, native.draw_tokens(logits, settings.T.contiguous().T))
    alone = [native.draw_tokens(logits[row : row + 1], settings[row : row + 1]).item() for row in range(24)]
    assert found.tolist() == alone


def test_native_draws_from_hard_rows_are_the_plain_ones(native: NativeBackend) -> None:
    logits, settings = make_hard_rows(2, 3001, 1024)
    expected, found = draw_tokens(logits, settings), native.draw_tokens(logits, settings)
    for row in (expected != found).nonzero().flatten().tolist():
        assert is_a_close_call(logits[row], settings[row], int(found[row])), (row, settings[row])
