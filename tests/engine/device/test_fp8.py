"""fp8: which devices compute it, what is refused before any work, and how much memory it takes."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine import EngineConfig
from engine.device.placement import dtype_name, find_dtype
from engine.errors import CapacityError, ConfigError
from engine.kv.kv_cache import KVCache, KVShape
from engine.limits import check_kv_budget, check_weights
from engine.model.model import Model
from engine.model.model_shape import ModelShape
from engine.simulation.device import DEVICES, Roofline, StepWork
from tasks.forecast.hardware import choose_hardware
from tasks.workers.engine_team import EngineTeam
from tests.engine.execution.test_memory_budget import Operations

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    name: str
    major: int = 0
    minor: int = 0
    gcnArchName: str = ""


@pytest.mark.parametrize(
    ("gpu", "found"),
    [
        (Gpu("NVIDIA H200", 9, 0), torch.float8_e4m3fn),
        (Gpu("NVIDIA L40S", 8, 9), torch.float8_e4m3fn),
        (Gpu("NVIDIA A100", 8, 0), None),
        (Gpu("AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-"), torch.float8_e4m3fnuz),
        (Gpu("AMD Instinct MI355X", gcnArchName="gfx950:sramecc+:xnack-"), torch.float8_e4m3fn),
        (Gpu("AMD Instinct MI250X", gcnArchName="gfx90a:sramecc+:xnack-"), None),
    ],
)
def test_the_format_is_the_device_s(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, found: torch.dtype | None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch, "version", SimpleNamespace(hip="7.0" if gpu.gcnArchName else None))
    device = torch.device("cuda")
    if found is None:
        with pytest.raises(ConfigError, match=f"dtype 'fp8' is computed on .* not on {gpu.name}: set dtype to auto"):
            find_dtype("fp8", device)
        return
    assert find_dtype("fp8", device) == found
    assert dtype_name(found) == "fp8"


def test_a_cpu_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"dtype 'fp8' is computed on .* not on this CPU: set dtype to auto"):
        check_weights(EngineConfig(dtype="fp8", device="cpu"), tiny_llama)
    with pytest.raises(ConfigError, match="dtype 'fp8' is computed on a GPU, not by attention 'torch'"):
        EngineConfig(dtype="fp8", attention="torch")
    with pytest.raises(ConfigError, match="dtype 'fp8' does not go with a model on 2 devices"):
        EngineConfig(dtype="fp8", tensor_parallel_size=2)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz])
def test_blocks_are_copied_to_the_last_bit(dtype: torch.dtype) -> None:
    """NaN and both zeros included; a block has its values and 2 bytes of scale for each head."""
    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=32, dtype=dtype)
    cache = KVCache(shape, block_size=16, budget_bytes=5 * 16 * shape.bytes_per_token, device=torch.device("cpu"))
    assert shape.bytes_per_token == 2 * 2 * 2 * (32 + 2)
    assert cache.num_blocks == 5
    assert cache.keys[0].dtype == dtype
    for tensor in cache.tensors:
        tensor.copy_(torch.randint(0, 256, tensor.shape, dtype=torch.uint8))
    before = [tensor.clone() for tensor in cache.tensors]
    kept = cache.read_blocks(np.array([3, 1], dtype=np.int32))
    cache.write_blocks(np.array([0, 4], dtype=np.int32), kept)
    for tensor, old in zip(cache.tensors, before, strict=True):
        assert torch.equal(tensor[[0, 4, 1, 2, 3]], old[[3, 1, 1, 2, 3]])
    assert cache.keys[0].view(torch.uint8).data_ptr() == cache.tensors[0].data_ptr()


def test_explain_counts_what_is_in_8_bits_and_what_is_not() -> None:
    narrow, wide = (ModelShape.from_config(CONFIG, dtype=dtype) for dtype in ("fp8", "bfloat16"))
    layers = narrow.num_layer_weights
    tables = 2 * 2 * narrow.num_head_weights  # embedding and output layer stay in 16 bits
    assert narrow.weight_bytes == layers + tables
    assert wide.weight_bytes == 2 * layers + tables
    assert narrow.kv_bytes_per_token == 32 * 2 * 8 * (128 + 2)
    work = StepWork(num_rows=1, num_output_rows=1, num_attention_pairs=0, num_kv_tokens_read=0)
    in_fp8 = Roofline(narrow, DEVICES["h200"], "fp8")
    assert in_fp8.count_bytes(work) == layers + 2 * narrow.num_head_weights + narrow.kv_bytes_per_token
    with pytest.raises(ConfigError, match="device 'a100' has no rate for dtype 'fp8'"):
        Roofline(narrow, DEVICES["a100"], "fp8")


def test_a_kv_budget_is_judged_by_the_format(tiny_llama: Path) -> None:
    hardware = choose_hardware(tiny_llama, EngineTeam(engine=EngineConfig(dtype="fp8")), "h200")
    block_bytes = 16 * hardware.shape.kv_bytes_per_token
    check_kv_budget(EngineConfig(dtype="fp8", block_size=16, kv_memory_bytes=2 * block_bytes), tiny_llama)
    with pytest.raises(CapacityError, match=f"one block of 16 tokens needs {block_bytes} bytes"):
        check_kv_budget(EngineConfig(dtype="fp8", block_size=16, kv_memory_bytes=2 * block_bytes - 1), tiny_llama)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="older torch has one scale a matrix on a CPU")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    "reason",
    [
        "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic(...)`",
        "Rowwise scaling is not currently supported on your device",
        "cutlass cannot initialize",
    ],
)
def test_a_product_without_a_kernel_for_scales_of_rows_is_scaled_afterwards(
    monkeypatch: pytest.MonkeyPatch, reason: str, has_bias: bool
) -> None:
    from engine.kernels.triton.layers.fp8 import _SCALED_AFTERWARDS, quantize_weights, scaled_linear

    _SCALED_AFTERWARDS.clear()
    torch.manual_seed(1)
    rows, weights = (quantize_weights(torch.randn(size, 64), torch.float8_e4m3fn) for size in (3, 48))
    bias = torch.randn(48).bfloat16() if has_bias else None
    exact = (rows.values.double() * rows.scales) @ (weights.values.double() * weights.scales).t()
    exact = exact if bias is None else exact + bias
    product = torch._scaled_mm
    num_refused = 0

    def product_of_one_scale(*factors: torch.Tensor, scale_a: torch.Tensor, **how: object) -> torch.Tensor:
        nonlocal num_refused
        if scale_a.numel() > 1:
            num_refused += 1
            raise RuntimeError(reason)
        return product(*factors, scale_a=scale_a, **how)

    monkeypatch.setattr(torch, "_scaled_mm", product_of_one_scale)
    with Operations() as operations:
        found = scaled_linear(rows, weights, bias, torch.bfloat16)
    assert not operations.found & {torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor}, "scaled in place"
    assert found.dtype == torch.bfloat16
    assert torch.allclose(found.double(), exact, rtol=2**-8, atol=1e-4)
    assert torch.equal(scaled_linear(rows, weights, bias, torch.bfloat16), found)
    assert num_refused == 1, "torch is asked once"
    reason = "CUBLAS_STATUS_EXECUTION_FAILED"
    with pytest.raises(RuntimeError, match=reason):
        scaled_linear(weights, weights, bias, torch.bfloat16)
    _SCALED_AFTERWARDS.clear()


@pytest.mark.parametrize(("settings", "num_tensors"), [({}, 4), ({"unknown": 1}, 5)], ids=["own", "transformers"])
def test_layers_wait_on_the_host_until_they_are_converted(
    settings: dict[str, int], num_tensors: int, tiny_llama: Path, tmp_path: Path
) -> None:
    """A model may fit into a GPU's memory only in 8 bits; here the GPU is torch's device without memory. A key that
    batchloom does not know leaves reading the model to transformers, whose rotary embedding has two tensors."""
    from engine.kernels.triton.layers.gpu_layers import weights_on

    gpu, folder = torch.device("meta"), tmp_path / "model"
    shutil.copytree(tiny_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    model = Model.load(folder, dtype=torch.float8_e4m3fn, device=gpu)
    assert {weight.device.type for weight in model.base.layers.parameters()} == {"cpu"}
    parts = [part for name, part in model.base.named_children() if name != "layers"]
    tensors = [tensor for part in (*parts, model._head) for tensor in (*part.parameters(), *part.buffers())]
    assert len(tensors) == num_tensors
    assert {tensor.device for tensor in tensors} == {gpu}
    for layer in model._take_layers():
        moved = weights_on(gpu, layer)
        named = [moved.attention_norm, *moved.qkv, *moved.output, moved.mlp_norm, moved.gate, moved.up, moved.down]
        assert {tensor.device for tensor in named if tensor is not None} == {gpu}
        assert moved.scoring == layer.scoring
    assert {type(layer) for layer in model.base.layers} == {torch.nn.Identity}, "each is freed before the next one"
