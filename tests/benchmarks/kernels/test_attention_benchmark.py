"""The kernel benchmark without a GPU: its gate works, and it prints no figure."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import attention, gpu
from benchmarks.kernels.attention_batches import make_batch
from benchmarks.kernels.attention_implementations import NAMES, compiled
from benchmarks.kernels.attention_step import BLOCK_SIZE, HEADS, TINY_CASE, Case, Step, check_cases, grid
from benchmarks.kernels.gpu import Ceilings, DeviceTime, captured
from benchmarks.kernels.relay_model import equation_10
from engine.kernels.triton.tuned import CONFIG_FOLDER, load_tuned
from engine.kernels.triton.work_list import RowField, TileField, WorkList, build_work_list
from tests.interpreting import INTERPRETING

ROOT = Path(__file__).parents[3]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.kernels.attention", *arguments],
        cwd=ROOT, env=os.environ | hidden | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_every_implementation_passes_the_gate() -> None:
    """On a case that the interpreter computes in seconds."""
    done = run("--cases", "*prefix-40 *", **INTERPRETING)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [line.split(": ", 2) for line in done.stdout.splitlines()]
    assert all("prefix-40 " in case for _, case, _ in found)
    ours_and_torch_s = {"fused", "relay", "paged", "sdpa", "flex"}
    assert {name: result for name, _, result in found if name in ours_and_torch_s} == dict.fromkeys(
        ours_and_torch_s, "agrees with float64"
    )


def work_lists(architecture: str, case: Case) -> Iterator[tuple[str, WorkList]]:
    """The tiles of a case under each policy and launch, on a device like the one of its configuration."""
    num_q_heads, num_kv_heads, head_dim = HEADS[case.model]
    batch, _ = make_batch(case.groups(), BLOCK_SIZE)
    tuned = load_tuned(architecture, element_bits=16, head_dim=head_dim)
    for policy, launch in product(("fused", "relay", "paged"), tuned.launches):
        yield (
            policy,
            build_work_list(
                batch, replace(tuned, launches=(launch,)), group_size=num_q_heads // num_kv_heads,
                num_kv_heads=num_kv_heads, policy=policy,
            ),
        )  # fmt: skip


def kinds(work_list: WorkList) -> Iterator[tuple[str, str, str]]:
    """For each tile: the launch, the shape, and whether it reads prefix or own KV."""
    for tile in work_list.tiles:
        is_packed = tile[TileField.POSITION_AT] > 0
        is_prefix = tile[TileField.FIRST_ROW_ID] >= len(work_list.rows)
        is_own = tile[TileField.KV_BEGIN] >= tile[TileField.PREFIX_LEN] > 0
        shape = "wide" if tile[TileField.IS_WIDE] else "narrow"
        kind = "packed" if is_packed else "prefix" if is_prefix else "own" if is_own else "paged"
        yield work_list.launch.name, shape, kind


@pytest.mark.parametrize("architecture", sorted(file.stem for file in CONFIG_FOLDER.glob("*.json")))
def test_the_check_s_cases_take_every_kind_of_tile(architecture: str) -> None:
    """A gate without wide tiles and merges would not find a wrong kernel."""
    found = set()
    most_parts = {"fused": 0, "relay": 0, "paged": 0}
    for case in check_cases():
        for policy, work_list in work_lists(architecture, case):
            found |= set(kinds(work_list))
            num_parts = int(work_list.rows[:, RowField.NUM_PARTS].max())
            most_parts[policy] = max(most_parts[policy], num_parts)
    launches = load_tuned(architecture, element_bits=16, head_dim=128).launches
    narrow = {(launch.name, "narrow", kind) for launch in launches for kind in ("prefix", "own", "paged", "packed")}
    wide = {(launch.name, "wide", kind) for launch in launches if launch.wide for kind in ("prefix", "own", "paged")}
    if architecture == "interpreter":  # has few programs, so short own parts are packed
        narrow.discard(("mixed", "narrow", "own"))
    assert found == narrow | wide
    if architecture != "interpreter":  # has few processors, so few splits
        assert min(most_parts.values()) >= 7


def test_the_grid_is_fig_8_s() -> None:
    cases = list(grid())
    assert len(cases) == len({case.name for case in cases}) == 2 * 3 * 27
    assert {(case.num_decode, case.num_prefill) for case in cases} == {(32, 0), (256, 0), (256, 7)}
    for case in cases:
        groups = case.groups()
        assert sum(len(group.members) for group in groups) == case.num_decode + case.num_prefill


def test_equation_10() -> None:
    """RelayAttention Fig. 6: no gain for one request, and towards (s + c) / (s / b + c) for long prompts."""
    assert equation_10(1, 4096, 128) < 1
    assert equation_10(32, 4096, 128) == pytest.approx(4226 / 263)


CEILINGS = Ceilings(memory_gb_s=1.0, matrix_tflops=1.0)
CPU = torch.device("cpu")


def right(step: Step) -> torch.Tensor:
    return step.expected().to(step.query.dtype)


def fail(_: object) -> torch.Tensor:
    raise RuntimeError("out of everything\nand more lines")


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[Step], torch.Tensor]]:
    """Implementations to compare, instead of the real ones; "timed" on the CPU."""
    found: dict[str, Callable[[Step], torch.Tensor]] = {"fused": right, "relay": right, "paged": right}

    def implementations(step: Step, _: object) -> Iterator[tuple[str, Callable[[], attention.Attend]]]:
        for name, attend in found.items():
            yield name, lambda attend=attend: partial(attend, step)

    monkeypatch.setattr(attention, "implementations", implementations)
    monkeypatch.setattr(attention, "device_time", lambda _: DeviceTime(us=2.0, not_captured=""))
    return found


def test_a_wrong_result_of_ours_ends_the_run(offered: dict[str, Callable[[Step], torch.Tensor]]) -> None:
    offered.clear()
    offered["flex"] = lambda step: torch.zeros_like(step.query)
    offered["fused"] = lambda step: torch.full_like(step.query, torch.nan)
    gate = attention.gated(Step.make(TINY_CASE, CPU), lambda _: "agrees", NAMES)
    name, found = next(gate)
    assert name == "flex"
    assert "no time: differs from float64" in found
    with pytest.raises(SystemExit, match="fused is wrong by nan% on Qwen2-7B prefix-16"):
        next(gate)


def test_a_wrong_result_of_one_launch_ends_the_run() -> None:
    step = Step.make(TINY_CASE, CPU)
    launches = {"fused, decode": right, "paged, mixed": lambda step: torch.zeros_like(step.query)}
    others = [(name, lambda attend=attend: partial(attend, step)) for name, attend in launches.items()]
    gate = attention.gated(step, lambda _: "agrees", (), others)
    assert next(gate) == ("fused, decode", "agrees")
    with pytest.raises(SystemExit, match="paged, mixed is wrong by 100"):
        next(gate)


def test_a_lost_block_of_many_is_a_wrong_result(offered: dict[str, Callable[[Step], torch.Tensor]]) -> None:
    """The numbers of a row become smaller with the tokens that it sees, and so does what a block adds to them."""

    def lose_a_block(step: Step) -> torch.Tensor:
        batch = replace(step.batch, prefix_lens=step.batch.prefix_lens - BLOCK_SIZE)
        return right(replace(step, batch=batch))

    torch.manual_seed(0)
    case = next(case for case in check_cases() if (case.prefix_len, case.num_prefill) == (2056, 0))
    step = Step.make(case, CPU)
    assert dict(attention.gated(step, lambda _: "agrees", NAMES)) == dict.fromkeys(offered, "agrees")
    offered["paged"] = lose_a_block
    with pytest.raises(SystemExit, match=r"paged is wrong by [0-9.]+% on Qwen2-7B prefix-2056"):
        dict(attention.gated(step, lambda _: "agrees", NAMES))


def test_another_s_failure_is_its_result_and_ours_ends_the_case(
    offered: dict[str, Callable[[Step], torch.Tensor]],
) -> None:
    offered["flex"] = fail
    case = attention.measure(TINY_CASE, CPU, CEILINGS)
    assert case["us"] == {"fused": 2, "relay": 2, "paged": 2, "flex": "no time: RuntimeError: out of everything"}
    assert set(case["speedup_of_fused"]) == {"fused", "relay", "paged"}
    assert attention.summary([case])["worst over paged"] == 1
    offered["relay"] = fail
    with pytest.raises(RuntimeError, match="out of everything") as raised:
        attention.measure(TINY_CASE, CPU, CEILINGS)
    assert raised.value.__notes__ == [f"relay on {TINY_CASE.name}"]


def test_a_kernel_thousands_of_times_as_fast_as_ours_has_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for what SDPA computes in microseconds."""
    times = {"fused": 300_000.0, "paged": 300_000.0, "sdpa": 60.0}
    found = [(name, DeviceTime(us=us, not_captured="no GPU")) for name, us in times.items()]
    monkeypatch.setattr(attention, "gated", lambda *_: found)
    case = attention.measure(TINY_CASE, CPU, CEILINGS)
    assert attention.summary([case])["geometric mean over sdpa"] == pytest.approx(0.0002)


def test_cases_are_chosen_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attention.main(["--cases", "Llama-4*"])
    assert "--cases 'Llama-4*' fits none; the first is 'Qwen2-7B prefix-40" in capsys.readouterr().err


def test_a_function_is_compiled_however_many_variants_came_before() -> None:
    """torch compiles only eight variants; uncompiled FlexAttention holds all scores in memory."""

    def probe(values: torch.Tensor) -> torch.Tensor:
        return values + int(torch.compiler.is_compiling())

    for size in range(2, 14):
        assert int(compiled(probe, backend="eager")(torch.zeros(size)).sum()) == size


def test_a_ceiling_is_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time that contains the host's would be a lower ceiling, of which every share is larger."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "device_time", lambda _: DeviceTime(us=2.0, not_captured=""))
    assert gpu.graph_us(print) == 2.0
    monkeypatch.setattr(gpu, "device_time", lambda _: DeviceTime(us=2.0, not_captured="ValueError: no"))
    with pytest.raises(RuntimeError, match="not captured in a CUDA graph: ValueError: no"):
        gpu.graph_us(print)


def test_what_cannot_be_captured_is_timed_as_it_is_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def call() -> None:
        calls.append(1)

    def no_graph() -> None:
        try:
            raise RuntimeError("no device")
        finally:
            raise ValueError("nothing was captured")

    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", no_graph)
    timed, reason = captured(call)
    assert timed is call
    assert reason == "RuntimeError: no device"
    assert calls == [1]
