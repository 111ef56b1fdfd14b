"""The program for the first minutes with a GPU, on the CPU: every stage runs, resumes, and may crash or hang alone."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.first_light import __main__ as program
from benchmarks.first_light import again, flex
from benchmarks.first_light.goals import goals, print_goals
from benchmarks.first_light.host import PARTS, decode_step_ms
from benchmarks.first_light.profile import summed
from benchmarks.first_light.results import DONE, FAILED, UNFINISHED, read_parts, read_stage
from benchmarks.first_light.stage_run import StageRun
from benchmarks.first_light.tuning import tuned_launches
from benchmarks.kernels.attention_step import TINY_CASE
from engine.kernels.triton.tuned import CONFIG_FOLDER, load_tuned
from tests.interpreting import INTERPRETING

ROOT = Path(__file__).parents[3]


FORKING = """
import os, sys
import torch, transformers, triton
from benchmarks.first_light import __main__ as program

def run_process(name, arguments, seconds, goes_on):
    child = os.fork()
    if not child:
        arguments.child, arguments.seconds, arguments.goes_on = name, seconds, goes_on
        code = 1
        try:
            code = program.run_child(arguments)
        finally:
            sys.stdout.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

program.run_process = run_process
sys.exit(program.main())
"""
"""The program with stages that are copies of its process, which has imported once what takes each of them seconds."""


def first_light(
    folder: Path, *arguments: str, program: Sequence[str] = ("-m", "benchmarks.first_light")
) -> subprocess.CompletedProcess[str]:
    environment = os.environ | INTERPRETING | {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *program, "--out", str(folder), *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the whole program in Triton's interpreter."""
    folder = tmp_path_factory.mktemp("first_light")
    stages = ("--stages", *program.STAGE_MINUTES)
    done = first_light(folder, "--tiny", "--minutes", "30", "--commit", "abc", *stages, program=("-c", FORKING))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder


@pytest.mark.slow
def test_every_stage_runs_and_is_not_run_again(
    whole_run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stage in program.STAGE_MINUTES:
        found = read_stage(whole_run, stage)
        assert found["status"] == "done", stage
        assert found["hardware"] == "Triton's interpreter, no figure"
        assert found["commit"] == "abc"
        assert all({"found", "seconds", "at"} == part.keys() for part in found["parts"].values())
    assert {name for name in read_parts(whole_run, "batches") if ":" in name} == {
        "ours: prefill", "ours in fp8: prefill", "server: case-1", "transformers: case-1-short",
        "profile: prefill", "profile: prefill in fp8", "profile: decode", "profile: case-1",
    }  # fmt: skip
    files = {file: file.read_bytes() for file in whole_run.glob("*.json") if file.name != "stages.json"}
    assert len(files) == len(program.STAGE_MINUTES)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    child = ["--child", "gate", "--seconds", "60"]  # as the program starts it
    assert program.main([*child, "--out", str(whole_run), "--tiny", "--commit", "abc"]) == DONE
    assert capsys.readouterr().out == "done before\n"
    assert {file: file.read_bytes() for file in files} == files


def fields(found: Any, path: str = "") -> Iterator[str]:
    """The dotted path of every value; "-" for a single value."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from fields(value, f"{path}.{key}" if path else key)
        if not found:
            yield f"{path}.*"
    elif isinstance(found, list) and found and isinstance(found[0], dict):
        for value in found:
            yield from fields(value, path)
    else:
        yield path or "-"


def documented(page: str) -> Iterator[tuple[str, str, str, bool]]:
    """Of docs/first_light.md: stage, parts, field, and whether every run has it."""
    stage = parts = ""
    for line in page.splitlines():
        if line.startswith("## "):
            stage = line.removeprefix("## ").removesuffix(".json")
        elif line.startswith("| ") and line.count("|") == 4 and "`" in line:
            named, found = line.split("|")[1:3]
            parts = named if named.strip() else parts
            for field in found.split("`")[1::2]:
                yield stage, parts, field, "†" not in parts + found


@pytest.mark.slow
def test_the_page_names_every_field(whole_run: Path) -> None:
    """The page lists no field that no stage writes."""
    page = list(documented((ROOT / "docs" / "first_light.md").read_text()))
    seen = set()
    for stage in program.STAGE_MINUTES:
        for part, found in read_parts(whole_run, stage).items():
            rows = [
                row for row in page if row[0] == stage and any(fnmatchcase(part, name) for name in row[1].split("`"))
            ]
            for field in fields(found):
                named = {row for row in rows if fnmatchcase(field, row[2])}
                assert named, f"docs/first_light.md has no {stage}, {part}, {field}"
                seen |= named
    assert seen == {row for row in page if row[3]}


def test_the_host_of_a_step_is_timed_by_part() -> None:
    found = decode_step_ms(load_tuned("sm_90", element_bits=16, head_dim=128), num_rows=20, num_steps=4)
    assert found.keys() == {*PARTS, "sum"}
    assert all(taken > 0 for taken in found.values())
    assert found["sum"] == pytest.approx(sum(found[part] for part in PARTS))


def test_without_a_gpu_there_is_no_figure(tmp_path: Path) -> None:
    done = first_light(tmp_path, "--stages", "attention")
    assert done.returncode == 1
    assert "no GPU is at hand, so nothing was measured" in done.stderr
    assert json.loads((tmp_path / "stages.json").read_text())["attention"]["exit_code"] == 1
    assert not (tmp_path / "attention.json").exists()


def test_the_program_begins_its_first_stage_at_once() -> None:
    """The process that starts stages imports nothing that takes seconds, since the device would be idle."""
    heavy = "import sys, benchmarks.first_light.__main__; print({'torch', 'triton', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", heavy], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def fail() -> None:
    raise RuntimeError("out of everything\nand more lines")


def stage_run(folder: Path, seconds: float = 60) -> StageRun:
    return StageRun("gate", folder, seconds=seconds, is_tiny=True)


def test_a_stage_goes_on_where_it_ended(tmp_path: Path) -> None:
    """Results are kept, parts without time are measured, failed parts are repeated after them."""
    measured: list[str] = []

    def value(name: str) -> int:
        measured.append(name)
        return len(measured)

    def run(stage: StageRun) -> None:
        stage.measure("a", lambda: value("a"))
        stage.measure("b", fail if len(measured) < 2 else lambda: value("b"))
        stage.measure("c", lambda: value("c"))

    first = stage_run(tmp_path)
    first.measure("a", lambda: value("a"))
    first.measure("b", fail)
    assert first.end() == FAILED
    assert read_stage(tmp_path, "gate")["parts"]["b"]["failure"] == "RuntimeError: out of everything"
    assert stage_run(tmp_path, seconds=0).run_parts(run) == FAILED
    assert measured == ["a"]
    assert stage_run(tmp_path).run_parts(run) == DONE
    assert measured == ["a", "c", "b"]
    assert stage_run(tmp_path).is_done
    assert read_parts(tmp_path, "gate") == {"a": 1, "c": 2, "b": 3}


def test_a_part_that_is_too_long_for_what_is_left_is_not_begun(tmp_path: Path) -> None:
    """It would be killed without a result; shorter ones after it are measured."""
    stage = stage_run(tmp_path, seconds=30)
    assert stage.measure("long", fail, seconds=40) is None
    assert stage.measure("short", lambda: 1, seconds=20) == 1
    assert stage.end() == UNFINISHED
    assert read_parts(tmp_path, "gate") == {"short": 1}


def test_a_stage_without_time_is_unfinished(tmp_path: Path) -> None:
    stage = stage_run(tmp_path, seconds=0)
    assert stage.measure("a", fail) is None
    assert stage.end() == UNFINISHED


@pytest.mark.parametrize("stage", [again, flex])
def test_cases_that_were_not_measured_are_not_done_again(tmp_path: Path, stage: ModuleType) -> None:
    """Else the stage would count as done, and a later call would skip it."""
    with pytest.raises(SystemExit, match="the stage attention has measured no case in "):
        stage.run(stage_run(tmp_path))
    assert not stage_run(tmp_path).is_done


def make_older(file: Path) -> None:
    """A stage's file as of another commit."""
    file.write_text(json.dumps(json.loads(file.read_text()) | {"commit": "another"}))


@pytest.mark.parametrize("stage", [again, flex])
def test_times_of_another_commit_are_not_compared_with_today_s(tmp_path: Path, stage: ModuleType) -> None:
    before = StageRun("attention", tmp_path, seconds=60, is_tiny=True)
    before.measure("ceilings", lambda: {"memory_gb_s": 1.0, "matrix_tflops": 1.0})
    before.measure(TINY_CASE.name, lambda: {"us": {"fused": 2.0}, "speedup_of_fused": {"paged": 1.0, "relay": 1.0}})
    make_older(tmp_path / "attention.json")
    with pytest.raises(SystemExit, match=r"measured no case in .* with this device, versions and commit"):
        stage.run(stage_run(tmp_path))
    assert not (tmp_path / "gate.json").exists()


def test_launches_of_another_commit_are_not_used(tmp_path: Path) -> None:
    """Its entries may have fields that today's do not have."""
    before = StageRun("tuning", tmp_path, seconds=60, is_tiny=True)
    entry = json.loads((CONFIG_FOLDER / "sm_90.json").read_text())["entries"][0] | {"origin": "this run"}
    before.measure("launches, 16-bit 64", lambda: {"architecture": "sm_90", "entry": entry})
    with tuned_launches(stage_run(tmp_path)) as is_tuned:
        assert is_tuned
        assert load_tuned("sm_90", element_bits=16, head_dim=64).origin == "this run"
    make_older(tmp_path / "tuning.json")
    with tuned_launches(stage_run(tmp_path)) as is_tuned:
        assert not is_tuned
        assert load_tuned("sm_90", element_bits=16, head_dim=64).origin != "this run"


def test_another_commit_begins_anew(tmp_path: Path) -> None:
    stage = stage_run(tmp_path)
    stage.measure("a", lambda: 1)
    stage.end()
    make_older(tmp_path / "gate.json")
    assert not stage_run(tmp_path).is_done
    assert stage_run(tmp_path).measure("a", lambda: 2) == 2


def test_goals_are_not_measured_until_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert {goal.verdict for goal in goals(tmp_path)} == {"not measured"}
    stage = StageRun("batches", tmp_path, seconds=60, is_tiny=True)
    for name, seconds in (("ours", 2.0), ("server", 4.0), ("transformers", 3.0)):
        for case in ("case-1", "case-1-short"):
            stage.measure(f"{name}: {case}", lambda seconds=seconds: {"median_seconds": seconds})
    for name, seconds in (("ours", 1.7), ("ours in fp8", 1.0)):
        stage.measure(f"{name}: prefill", lambda seconds=seconds: {"median_seconds": seconds})
    verdicts = {goal.name: goal.verdict for goal in goals(tmp_path)}
    assert verdicts["fp8 over bf16 on prefill"] == "met"
    assert (verdicts["case-1 over server"], verdicts["case-1-short over transformers"]) == ("met", "missed")
    (tmp_path / "gate.json").write_bytes((tmp_path / "batches.json").read_bytes())
    make_older(tmp_path / "gate.json")
    print_goals(tmp_path)
    printed = capsys.readouterr().out
    assert "  gate         Triton's interpreter, no figure, commit another\n" in printed
    assert f"  batches      Triton's interpreter, no figure, commit {stage.run.commit}\n" in printed
    assert "  attention    nothing yet\n" in printed


def test_gaps_between_kernels_are_what_no_kernel_covers() -> None:
    found = summed([(100.0, 110.0, "a"), (0.0, 50.0, "b"), (40.0, 60.0, "a")])
    assert found["total_ms"] == 0.11
    assert found["idle_share"] == pytest.approx(40 / 110, abs=1e-4)
    assert (found["num_long_gaps"], found["longest_gap_us"]) == (1, 40.0)
    assert found["kernels"] == [{"name": "b", "count": 1, "ms": 0.05}, {"name": "a", "count": 2, "ms": 0.03}]
