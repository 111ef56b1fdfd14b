"""What tests of quantized models share."""

import pytest

from tests.engine.kernels.compiled_units import compute_only_float32
from tests.engine.kernels.ragged_batches import CPU_FLAGS


@pytest.fixture(params=["bfloat16", "float32"])
def computed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What quantized weights are computed in."""
    if request.param == "float32":
        compute_only_float32(monkeypatch)
    elif "avx512_bf16" not in CPU_FLAGS:
        pytest.skip("this CPU does not multiply bfloat16")
    return str(request.param)
