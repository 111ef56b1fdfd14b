"""The KV budget of a GPU: what a full step and everything else need is measured, a share of the rest is taken."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from engine import Engine, EngineConfig
from engine.errors import CapacityError
from engine.execution import memory_budget
from engine.execution.memory_budget import MemoryProfile, find_kv_budget, measure_memory, most_kv_bytes
from engine.kernels.triton.tile_jobs import MOST_BLOCKS, SLOT_BITS, whole_blocks
from engine.kv.kv_cache import KVCache, KVShape
from engine.scheduling.policies.preemption import SwapSpace

PROFILE = MemoryProfile(total=1000, elsewhere=100, resident=300, step=150, graphs=50)


@pytest.mark.parametrize(("memory_fraction", "budget"), [(1.0, 400), (0.8, 320), (0.25, 100)])
def test_a_share_of_what_is_left_is_for_kv(memory_fraction: float, budget: int) -> None:
    assert PROFILE.kv_share_bytes(memory_fraction) == budget


def test_a_process_beside_this_one_needs_as_much_and_gets_as_much() -> None:
    profile = replace(PROFILE, total=2000)
    assert profile.kv_share_bytes(0.5, num_processes=2) == (2000 - 100 - 2 * 500) // 4
    with pytest.raises(CapacityError, match=r"weights 0\.60,"):
        replace(profile, total=10**9, elsewhere=0, resident=3 * 10**8, step=2 * 10**8, graphs=0).kv_share_bytes(
            0.5, num_processes=2
        )


@pytest.mark.parametrize("resident", [700, 5000])
def test_nothing_left_is_refused_with_the_figures(resident: int) -> None:
    profile = MemoryProfile(
        total=80 * 10**9, elsewhere=4 * 10**9, resident=resident * 10**8, step=5 * 10**9, graphs=10**9
    )
    with pytest.raises(CapacityError) as refused:
        profile.kv_share_bytes(0.9)
    assert str(refused.value) == (
        f"no memory is left for KV: of 80.00 GB, weights {resident / 10:.2f}, a full step 5.00, CUDA graphs 1.00, "
        "other use of the device 4.00 GB; a smaller max_num_batched_tokens makes a step smaller, "
        "cuda_graphs 'never' takes none for graphs"
    )


class Device:
    """torch.cuda's counters of a device on which nothing but the profiling step happens."""

    def __init__(self, *, resident: int, other: int, peak: int, kept: int) -> None:
        self._resident, self._other, self._peak, self._kept = resident, other, peak, kept
        self.log: list[str] = []

    def synchronize(self, device: torch.device) -> None:
        pass

    def empty_cache(self) -> None:
        self.log.append("empty")

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.log.append("reset")

    def memory_reserved(self, device: torch.device) -> int:
        self.log.append("read")
        return self._resident if self.log.count("read") == 1 else self._kept

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        return 10**9 - self._kept - self._other, 10**9

    def max_memory_reserved(self, device: torch.device) -> int:
        return self._peak

    def replace_counters(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in vars(Device):
            if not name.startswith("_") and name != "replace_counters":
                monkeypatch.setattr(torch.cuda, name, getattr(self, name))


class Operations(TorchDispatchMode):
    """Notes which operations of torch are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("max_num_batched_tokens", [17, 700])
def test_a_full_step_is_measured_and_its_own_kv_left_out(
    tiny_llama: Path, max_num_batched_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        dtype="float32", device="cpu", attention="torch", max_num_batched_tokens=max_num_batched_tokens, block_size=16
    )
    engine = Engine.load(tiny_llama, replace(config, kv_memory_bytes=1 << 20))
    device = Device(resident=10**6, other=5 * 10**6, peak=10**8, kept=2 * 10**7)
    device.replace_counters(monkeypatch)
    rows: list[tuple[str, int]] = []

    def watch(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, torch.nn.Embedding):
            rows.append(("layers", args[0].numel()))
        elif module is engine._model._output_layer.linear:
            rows.append(("output layer", len(args[0])))

    operations = Operations()
    with register_module_forward_pre_hook(watch), operations:
        profile = measure_memory(engine._model, engine._runner.attention, config, graph_share=0.25, graph_bytes=1000)
    (name, num_rows), *output_rows = rows
    assert (name, num_rows) == ("layers", max_num_batched_tokens)
    most_rows = min(max_num_batched_tokens, 256)
    drawn, scored = output_rows[:-1], output_rows[-1]
    assert sum(num_rows for _, num_rows in drawn) == most_rows, "all are drawn from, a part at a time"
    assert scored == ("output layer", most_rows)
    assert torch.ops.aten.__rshift__.Tensor in operations.found, "rows are drawn from as those of grammars are"
    resets = ["empty", "reset"]
    assert device.log == [*resets, "read", "read", *resets], "the peak counts from before the step"
    kv_bytes = -(-max_num_batched_tokens // 16) * 16 * engine._model.kv_shape.bytes_per_token
    step = 10**8 - 10**6 - kv_bytes
    assert profile == MemoryProfile(
        total=10**9, elsewhere=5 * 10**6, resident=10**6, step=step, graphs=step // 4 + 1000
    )


@pytest.mark.parametrize(("policy", "num_tables"), [({}, 4), ({"sharing": "lru"}, 1)])
def test_each_block_table_of_a_step_has_scratch_memory(
    tiny_llama: Path, policy: dict[str, Any], num_tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(device="cpu", attention="torch", max_num_batched_tokens=17, block_size=16, **policy)
    engine = Engine.load(tiny_llama, replace(config, kv_memory_bytes=1 << 20))
    model, backend = engine._model, engine._runner.attention
    model.kv_shape = replace(model.kv_shape, windows=(8, 0, 8, 8))
    monkeypatch.setattr(type(backend), "scratch_bytes", lambda _, num_rows: 1001 * num_rows)
    Device(resident=0, other=0, peak=0, kept=0).replace_counters(monkeypatch)
    sizes: list[int] = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kind: (sizes.append(size[0]), empty(*size, **kind))[1])
    measure_memory(model, backend, config, graph_share=0.0, graph_bytes=0)
    assert num_tables * 1001 * 17 in sizes


class Placed:
    """As much of a model as its budget depends on."""

    kv_shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.bfloat16)

    def __init__(self, device: str, weight_bytes: int = 0) -> None:
        self.device = torch.device(device)
        self.weight_bytes = weight_bytes


def test_only_a_budget_of_auto_on_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Any] = []

    def measure(model: Placed, *_: Any, **graphs: Any) -> MemoryProfile:
        measured.append(model)
        assert graphs == {"graph_share": 0.0, "graph_bytes": 0}
        return PROFILE

    monkeypatch.setattr(memory_budget, "measure_memory", measure)
    cpu, gpu = Placed("cpu"), Placed("cuda")
    assert find_kv_budget(EngineConfig(memory_fraction=0.5), gpu, None, None) == 200  # type: ignore[arg-type]
    assert find_kv_budget(EngineConfig(), cpu, None, None) > 0  # type: ignore[arg-type]
    assert measured == [gpu]


@pytest.mark.parametrize(("free", "weights", "budget"), [(2000, 400, 800), (2000, 3000, 0), (10**11, 400, 2 * 1024**3)])
def test_the_weights_of_a_worker_that_will_start_are_left_out(
    free: int, weights: int, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where the weights of this process are in memory already."""
    monkeypatch.setattr(memory_budget, "free_memory_bytes", lambda device: free)
    alone, both = (
        EngineConfig(memory_fraction=1.0, disaggregation="none"),
        EngineConfig(memory_fraction=1.0, disaggregation="processes"),
    )
    model: Any = Placed("cpu", weights)
    assert find_kv_budget(alone, model, None, None) == min(free, 4 * 1024**3)  # type: ignore[arg-type]
    assert find_kv_budget(both, model, None, None) == budget  # type: ignore[arg-type]


@pytest.mark.parametrize("windows", [(), (8, 0, 8, 8)])
def test_a_tiny_model_has_no_more_blocks_than_a_block_table_can_number(windows: tuple[int, ...]) -> None:
    shape = KVShape(num_layers=4, num_kv_heads=1, head_dim=8, dtype=torch.bfloat16, windows=windows)
    cache = KVCache(shape, block_size=16, budget_bytes=1 << 20, device=torch.device("cpu"))
    num_blocks = most_kv_bytes(16, shape) // cache.block_bytes
    largest = whole_blocks(np.array([num_blocks], dtype=np.int64))  # the block for padding comes after the others
    assert largest >> SLOT_BITS == num_blocks == MOST_BLOCKS - 1


def test_pinned_host_memory_takes_up_to_twice_what_it_holds() -> None:
    cache = KVCache(
        KVShape(num_layers=1, num_kv_heads=1, head_dim=16, dtype=torch.float32),
        block_size=16,
        budget_bytes=1 << 20,
        device=torch.device("cpu"),
    )
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for setting, num_blocks in ((8 * cache.block_bytes, 8), ("auto", cache.num_blocks)):
        config = EngineConfig(preemption="swap", swap_memory_bytes=setting)
        assert SwapSpace.of_run(config, cache, cpu).num_blocks == num_blocks
        assert SwapSpace.of_run(config, cache, gpu).num_blocks == num_blocks // 2
