"""Kernels are tested with threads that share their work; a test may set another number."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
