"""What tests of quantized models share."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.engine.kernels.compiled_units import compute_only_float32
from tests.engine.kernels.ragged_batches import CPU_FLAGS
from tests.engine.model.quantized_files import write_shaped


@pytest.fixture(scope="session")
def shaped(tiny_checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the tiny checkpoint of a family whose sizes the formats cover, made once a session; not to be changed."""
    return cache(lambda family: write_shaped(tiny_checkpoint(family), tmp_path_factory.mktemp(family)))


@pytest.fixture(params=["bfloat16", "float32"])
def computed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What quantized weights are computed in."""
    if request.param == "float32":
        compute_only_float32(monkeypatch)
    elif "avx512_bf16" not in CPU_FLAGS:
        pytest.skip("this CPU does not multiply bfloat16")
    return str(request.param)
