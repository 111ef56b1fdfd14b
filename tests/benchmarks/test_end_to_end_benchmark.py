"""The end-to-end benchmark as a whole, on a tiny random model: which engines are measured, refused or skipped."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import end_to_end, render
from benchmarks.measuring import comparison, engine_session
from benchmarks.measuring.batch import Batch, random_groups
from benchmarks.measuring.correctness import Referee, Verdict
from benchmarks.measuring.machine import commit
from benchmarks.measuring.model_folder import read_model_shape
from benchmarks.measuring.timed_runs import Ceilings, Timed, figures, measure_batch, speedups
from benchmarks.measuring.workloads import MICRO_DEGREES, MICRO_LENGTHS, Sizes, make_batches, workload_names
from benchmarks.peers import vllm_engine
from benchmarks.peers.catalog import PEERS, Peer, available, find_python
from benchmarks.peers.process import PeerError, PeerProcess
from benchmarks.peers.protocol import Answers, Loaded, LoadSettings, Work
from benchmarks.random_model import SHAPES, write_checkpoint

WRONG_ENGINE = """
from benchmarks.peers.protocol import Answers, Loaded, serve

class WrongEngine:
    def load(self, settings):
        return Loaded(versions={})

    def run(self, work):
        return Answers(token_ids=[[3] * work.num_output_tokens for _ in work.token_ids], seconds=1e-6)

serve(WrongEngine())
"""


@pytest.fixture
def wrong_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An engine in the catalog that is very fast and always gives the same answer."""
    (tmp_path / "wrong_engine.py").write_text(WRONG_ENGINE)
    launcher = tmp_path / "python"
    launcher.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/wrong_engine.py"\n')
    launcher.chmod(0o700)
    wrong = Peer(name="wrong", module="wrong_engine", package="torch")
    absent = Peer(name="absent", module="absent_engine", package="no_such_package", environment="no-such-folder")
    monkeypatch.setattr(end_to_end, "PEERS", (*PEERS, wrong, absent))
    return launcher


@pytest.mark.slow
def test_a_right_engine_is_timed_a_wrong_one_is_not(
    tmp_path: Path, wrong_engine: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes, protocol, referee, rounds, JSON, tables and plot, with the real engines."""
    monkeypatch.setattr(engine_session, "PEERS_FOLDER", tmp_path / "peers")
    write_checkpoint(tmp_path / "model", SHAPES["tiny"])
    out = tmp_path / "results" / "end_to_end" / "cpu" / "end_to_end_tiny.json"
    engines = ["batchloom", "transformers-padded", "wrong", "absent"]
    exit_code = end_to_end.main(
        [
            *("--model", str(tmp_path / "model"), "--out", str(out), "--engines", *engines),
            *("--workloads", "case-1", "scoring", "squad", "--orders", "shuffled", "grouped", "--scale", "0.02"),
            *("--tokens", "150", "--kv-tokens", "128", "--repeats", "2", "--threads", "1", "--dtype", "float32"),
            *("--options", '{"ceilings": {"copy_bytes": 4194304}}', "--python", f"wrong={wrong_engine}"),
        ]
    )
    printed = capfd.readouterr().out
    found = json.loads(out.read_text())

    assert exit_code == 0
    assert set(found["skipped"]) == {"absent", "squad"}
    assert "absent                   skipped: not installed" in printed
    assert not found["correctness"]["wrong"]["is_right"]
    assert found["correctness"]["wrong"]["first_wrong"]["workload"] == "case-1"
    assert "wrong                    float32: wrong: case-1, request 0, position" in printed
    assert set(found["engines"]) == {"batchloom", "transformers-padded"}
    for name in found["engines"]:
        verdict = found["correctness"][name]
        assert verdict["num_greedy"] + verdict["num_near_ties"] == verdict["num_answers"] == 10
    assert [(w["name"], w["order"]) for w in found["workloads"]] == [
        (name, order) for name in ("case-1", "scoring") for order in ("shuffled", "grouped")
    ]
    assert found["ceilings"]["matrix_flops_per_second"] == max(found["ceilings"]["by_product"].values())
    for workload in found["workloads"]:
        assert set(workload["engines"]) == set(found["engines"])  # no speed of the wrong engine
        ours = workload["engines"]["batchloom"]
        assert len(ours["seconds"]) == 2
        assert ours["requests_per_second"] > 0
        num_least = workload["num_distinct_tokens"] + max(0, workload["num_output_tokens"] - workload["num_requests"])
        assert ours["num_computed_tokens"] >= num_least
        assert set(workload["batchloom_over"]) == {"transformers-padded"}

    document = tmp_path / "end_to_end.md"
    document.write_text("# Before\n<!-- end-to-end: generated -->\nold\n<!-- end-to-end: end -->\nAfter\n")
    render.render(out.parents[2], document)
    text = document.read_text()
    assert text.startswith("# Before\n")
    assert text.endswith("\nAfter\n")
    assert "old" not in text
    assert "wrong or failed, so no speed" in text
    assert "| absent | | | skipped" in text
    assert (tmp_path / "charts" / "end_to_end_tiny.svg").read_text().count("<rect") > 4 * len(found["engines"])


def test_batchloom_itself_is_refused_a_speed_when_wrong(
    tmp_path: Path, wrong_engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_session, "PEERS_FOLDER", tmp_path / "peers")
    write_checkpoint(tmp_path / "model", SHAPES["tiny"])
    out = tmp_path / "result.json"
    arguments = [
        "--model",
        str(tmp_path / "model"),
        "--engines",
        "batchloom",
        "--workloads",
        "case-1",
        "--out",
        str(out),
    ]
    arguments += ["--scale", "0.02", "--tokens", "150", "--kv-tokens", "128", "--threads", "1"]
    with pytest.raises(SystemExit, match="no figures: batchloom: wrong: case-1, request 0, position 0"):
        end_to_end.main([*arguments, "--python", f"batchloom={wrong_engine}"])
    assert not out.exists()


def test_a_failing_engine_says_why_and_its_process_ends(tmp_path: Path) -> None:
    settings = LoadSettings(
        model=str(tmp_path), dtype="float32", device="cpu", kv_tokens=128, kv_bytes=1, max_num_batched_tokens=64,
        max_model_len=64, num_threads=1, scratch=str(tmp_path),
    )  # fmt: skip
    peer = PEERS[0]
    log = tmp_path / "log"
    with (
        PeerProcess(peer.name, Path(sys.executable), peer.module, (), log=log, threads=1) as process,
        pytest.raises(PeerError, match=r"batchloom: load: ModelError: .*config\.json"),
    ):
        process.load(settings, 60)
    assert "Traceback" in log.read_text()


def test_an_engine_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.process.FAREWELL_SECONDS", 0.2)
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 600\n")
    sleeper.chmod(0o700)
    work = Work(token_ids=[[1]], num_output_tokens=1)
    with PeerProcess("sleeper", sleeper, "unused", (), log=tmp_path / "log", threads=1) as process:
        assert not process.has_ended
        with pytest.raises(PeerError, match=r"sleeper: run took more than 0 s, and was ended"):
            process.run(work, 0.2)
        assert process.has_ended
        with pytest.raises(PeerError, match=r"sleeper: ended"):  # a late answer is not used as the next one
            process.run(work, 60)


def test_an_engine_that_is_not_installed_has_no_python() -> None:
    absent = Peer(name="absent", module="absent_engine", package="no_such_package", environment="no-such-folder")
    assert find_python(absent, {}) is None
    assert find_python(absent, {"absent": Path("/usr/bin/python3")}) == Path("/usr/bin/python3")
    assert find_python(PEERS[0], {}) == Path(sys.executable)


def test_where_the_others_run_on_a_gpu_engines_for_the_cpu_are_skipped_by_name() -> None:
    chosen = {peer.name: Path("/usr/bin/python3") for peer in PEERS}
    absent = Peer(name="absent", module="absent_engine", package="no_such_package", environment="no-such-folder")
    pythons, skipped = available([*PEERS, absent], chosen, "cuda", "bfloat16")
    cpu_only = {"batchloom-torch", "openvino", "llama.cpp"}
    assert skipped == dict.fromkeys(cpu_only, "runs on the CPU only") | {"absent": "not installed (make bench-peers)"}
    assert pythons.keys() == chosen.keys() - cpu_only
    assert available(PEERS, chosen, "cpu", "bfloat16") == (chosen, {})
    without_int8 = {"batchloom-torch", "transformers-continuous", "transformers-padded"}
    assert available(PEERS, chosen, "cpu", "int8")[1] == dict.fromkeys(without_int8, "has no int8")


class CountingEngine:
    """Takes as many seconds as the number of its earlier runs."""

    has_ended = False

    def __init__(self) -> None:
        self.prompts: list[list[list[int]]] = []

    def run(self, work: Work, timeout_seconds: float) -> tuple[Answers, dict[str, int]]:
        self.prompts.append(work.token_ids)
        return Answers(token_ids=[], seconds=len(self.prompts)), {"host_bytes": 0, "device_bytes": 0}


@pytest.mark.parametrize(("device", "expected"), [("cpu", [2, 3, 4]), ("cuda", [3, 4, 5])])
def test_a_gpu_s_second_run_is_not_measured_either(tmp_path: Path, device: str, expected: list[float]) -> None:
    """The first run of a step's size computes it, the second one captures it."""
    session = engine_session.Session(
        model=tmp_path, device=device, num_threads=1, max_num_batched_tokens=64, options={}, pythons={}, logs=tmp_path,
        run_seconds=1.0,
    )  # fmt: skip
    sizes = Sizes(scale=0.02, num_tokens=150, kv_tokens=128, vocab_size=1000)
    (batch,) = make_batches(["case-1"], sizes, tokenizer=Path("unused"), squad=None, ranking=None)
    engine = CountingEngine()
    found = measure_batch(
        {"batchloom": engine}, batch, "shuffled", num_unmeasured=session.num_unmeasured, num_repeats=3, run_seconds=1
    )
    timed = found["batchloom"]
    assert isinstance(timed, Timed)
    assert timed.seconds == expected
    assert len({tuple(map(tuple, prompts)) for prompts in engine.prompts}) == len(engine.prompts)


def case_1_batch() -> Batch:
    sizes = Sizes(scale=0.02, num_tokens=150, kv_tokens=128, vocab_size=1000)
    (batch,) = make_batches(["case-1"], sizes, tokenizer=Path("unused"), squad=None, ranking=None)
    return batch


def test_without_a_warm_up_the_first_run_counts() -> None:
    found = measure_batch(
        {"batchloom": CountingEngine()}, case_1_batch(), "shuffled", num_unmeasured=0, num_repeats=2, run_seconds=1
    )
    timed = found["batchloom"]
    assert isinstance(timed, Timed)
    assert timed.seconds == [1, 2]


def test_a_factor_is_the_median_over_rounds_not_of_times() -> None:
    """A machine that is slow in one round is so for both engines."""
    answers = Answers(token_ids=[], seconds=1.0)
    times = {"batchloom": [2.0, 4.0, 3.0], "vllm": [6.0, 4.4, 3.3]}
    found = speedups({name: Timed(seconds=seconds, answers=answers) for name, seconds in times.items()})
    assert found == {"vllm": {"median": 1.1, "least": 1.1, "most": 3.0}}


@pytest.mark.parametrize(("gap", "is_right"), [(0.0, True), (1e-4, True), (0.1, False), (float("nan"), False)])
def test_tokens_are_right_or_wrong(gap: float, is_right: bool) -> None:
    process = SimpleNamespace(call=lambda *_: {"answer": {"gaps": [[0.0, gap]]}})
    batch = Batch(name="case-1", shape="", groups=[], num_output_tokens=2, labels=[], vocab_size=9)
    verdict = Verdict()
    Referee(process, timeout_seconds=1).judge(batch, [[3]], Answers(token_ids=[[1, 2]], seconds=1.0), verdict)  # type: ignore[arg-type]
    assert (verdict.is_right, verdict.num_greedy + verdict.num_near_ties) == (is_right, int(is_right))


@pytest.mark.parametrize(("label", "is_right"), [(-1.0, True), (-1.1, False), (float("nan"), False)])
def test_labels_are_right_or_wrong(label: float, is_right: bool) -> None:
    process = SimpleNamespace(call=lambda *_: {"answer": {"label_logprobs": [[-1.0, -0.5]]}})
    batch = Batch(name="scoring", shape="", groups=[], num_output_tokens=1, labels=[1, 2], vocab_size=9)
    verdict = Verdict()
    answers = Answers(token_ids=[[]], seconds=1.0, label_logprobs=[[label, -0.5]])
    Referee(process, timeout_seconds=1).judge(batch, [[3]], answers, verdict)  # type: ignore[arg-type]
    assert (verdict.is_right, verdict.num_greedy) == (is_right, int(is_right))


def test_the_machine_is_measured_in_each_measured_round() -> None:
    """Ceilings are measured before the engines run; the highest rate counts."""
    engine = CountingEngine()
    measured_after: list[int] = []
    measure_batch(
        {"batchloom": engine}, case_1_batch(), "shuffled", num_unmeasured=2, num_repeats=3, run_seconds=1,
        before_round=lambda: measured_after.append(len(engine.prompts)),
    )  # fmt: skip
    assert measured_after == [2, 3, 4]
    slow, fast = (
        Ceilings(device="CPU", matrix_flops_per_second=rate, copy_bytes_per_second=5 - rate, by_product={"fused": rate})
        for rate in (1.0, 2.0)
    )
    best = slow.best_of(fast)
    assert (best.matrix_flops_per_second, best.copy_bytes_per_second, best.by_product) == (2.0, 4.0, {"fused": 2.0})


def test_a_share_above_the_ceiling_is_not_measured(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model", SHAPES["tiny"])
    shape = read_model_shape(tmp_path / "model", "float32")
    answers = Answers(token_ids=[], seconds=1.0, num_computed_tokens=1000, details={"num_steps": 1})
    timed = Timed(seconds=[1.0], answers=answers)
    for rate, is_measured in ((1.0, False), (1e15, True)):
        ceilings = Ceilings(device="CPU", matrix_flops_per_second=rate, copy_bytes_per_second=1e15, by_product={})
        found = figures(timed, case_1_batch(), shape, ceilings)
        assert (found["share_of_ceiling"] is not None) == is_measured
        assert found["share_of_bandwidth_for_weights"] is not None
        reasons = found["not_measured"]
        assert set(reasons) == (set() if is_measured else {"share_of_ceiling", "share_of_ceiling_for_the_least_work"})
        assert all(reason.startswith("not measured: ") for reason in reasons.values())


def test_another_model_in_the_same_folder_is_converted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_session, "PEERS_FOLDER", tmp_path / "peers")
    session = engine_session.Session(
        model=tmp_path / "model", device="cpu", num_threads=1, max_num_batched_tokens=64, options={}, pythons={},
        logs=tmp_path, run_seconds=1.0,
    )  # fmt: skip
    scratches = []
    for _ in range(2):
        write_checkpoint(tmp_path / "model", SHAPES["tiny"])
        scratches += [session.settings("vllm", dtype, 128, 64).scratch for dtype in ("float32", "int8")]
    assert scratches[0] == scratches[1] != scratches[2] == scratches[3]


def test_the_folder_for_logs_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "model", SHAPES["tiny"])
    arguments = ["--model", str(tmp_path / "model"), "--engines", "vllm", "--python", f"vllm={tmp_path / 'none'}"]
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(SystemExit):
        end_to_end.main([*arguments, "--logs", str(file)])
    assert "--logs" in capsys.readouterr().err
    assert end_to_end.main([*arguments, "--logs", str(tmp_path / "new" / "logs"), "--model", "absent"]) == 1
    assert (tmp_path / "new" / "logs").is_dir()


def test_a_machine_without_git_has_an_unknown_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit() == "unknown"


def test_workloads_have_the_papers_shape() -> None:
    """Lengths by the scale, degrees kept, prefixes larger than the KV memory, rows shuffled but the same rows."""
    sizes = Sizes(scale=0.1, num_tokens=20_000, kv_tokens=1024, vocab_size=1000)
    random = [name for name in workload_names() if not name.startswith(("squad", "ranking"))]
    batches = {
        batch.name: batch for batch in make_batches(random, sizes, tokenizer=Path("unused"), squad=None, ranking=None)
    }
    assert set(batches) == set(random)
    for prefix, own in MICRO_LENGTHS:
        for degree in MICRO_DEGREES:
            batch = batches[f"micro-{prefix}-{own}-{degree}"]
            assert {len(group.prefix) for group in batch.groups} == {prefix // 10}
            assert {len(tokens) for group in batch.groups for tokens in group.own} == {own // 10}
            assert {len(group.own) for group in batch.groups} == {degree}
    for name, prefix, own, degree in (("case-1", 110, 40, 7.0), ("case-2", 77, 97.8, 11.36), ("control", 110, 40, 1.0)):
        batch = batches[name]
        assert np.mean([len(group.prefix) for group in batch.groups]) == pytest.approx(prefix, rel=0.1)
        assert np.mean([len(t) for group in batch.groups for t in group.own]) == pytest.approx(own, rel=0.1)
        assert batch.num_requests / len(batch.groups) == pytest.approx(degree, rel=0.05)
        assert batch.num_prefix_tokens > sizes.kv_tokens
    shuffled, grouped = (batches["case-1"].work(order) for order in ("shuffled", "grouped"))
    assert shuffled.token_ids != grouped.token_ids
    assert sorted(shuffled.token_ids) == sorted(grouped.token_ids)


def test_two_rounds_share_no_beginning_but_the_same_sharing() -> None:
    sizes = Sizes(scale=0.02, num_tokens=500, kv_tokens=128, vocab_size=1000)
    (batch,) = make_batches(["case-1"], sizes, tokenizer=Path("unused"), squad=None, ranking=None)
    first, second = (batch.work("shuffled", round_number=number).token_ids for number in (1, 2))
    assert all(a[0] != b[0] and a[1:] == b[1:] for a, b in zip(first, second, strict=True))
    assert len({tuple(prompt[:10]) for prompt in first}) == len({tuple(prompt[:10]) for prompt in second})


def test_random_groups_share_their_prefix_and_no_token_more() -> None:
    groups = random_groups(np.random.default_rng(0), [(5, [3] * 40)] * 3, vocab_size=50)
    for group in groups:
        assert len({own[0] for own in group.own}) > 20
        assert all(prompt[:5] == group.prefix for prompt in group.prompts)


def test_texts_become_documents_with_their_questions(tiny_llama: Path, tmp_path: Path) -> None:
    """SQuAD's and TREC's forms, with a real tokenizer."""
    paragraph = {"context": "The watchman walks.", "qas": [{"question": "Who?"}, {"question": "What does he do?"}]}
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps({"data": [{"title": "Night", "paragraphs": [paragraph] * 3}]}))
    (tmp_path / "queries.tsv").write_text("q1\twatchman\nq2\thouse\n")
    (tmp_path / "corpus.tsv").write_text("p1\tA watchman.\np2\tA house.\n")
    (tmp_path / "qrels.txt").write_text("q1 0 p1 2\nq1 0 p2 0\nq2 0 p2 1\n")
    sizes = Sizes(scale=1, num_tokens=10_000, kv_tokens=128, vocab_size=512)
    squads, ranking = make_batches(
        ["squad", "ranking"], sizes, tokenizer=tiny_llama / "tokenizer.json", squad=squad,
        ranking=tmp_path,
    )  # fmt: skip
    assert [len(group.own) for group in squads.groups] == [2, 2, 2]
    assert [len(group.own) for group in ranking.groups] == [2, 1]
    assert len(ranking.labels) == 2
    assert ranking.num_output_tokens == 1


class LoggedSession:
    """Starts engines that count up, and notes which are in memory together; those named cannot be loaded."""

    model = Path("unused")
    num_unmeasured = 1
    run_seconds = 1.0

    def __init__(self, *broken: str) -> None:
        self.broken = broken
        self.loaded: set[str] = set()
        self.most_loaded = 0
        self.prompts: dict[str, list[list[list[int]]]] = {}

    def settings(self, *_: Any) -> None: ...

    @contextmanager
    def start(self, name: str, *_: Any) -> Iterator[Any]:
        engine = CountingEngine()
        if name == "ceilings":
            rates = {"device": "CPU", "matrix_flops_per_second": 1e15, "copy_bytes_per_second": 1e15, "by_product": {}}
            yield SimpleNamespace(load=lambda *_: None, call=lambda *_: {"answer": rates})
            return
        self.loaded.add(name)
        self.most_loaded = max(self.most_loaded, len(self.loaded))
        self.prompts[name] = engine.prompts

        def load(*_: Any) -> tuple[Loaded, float, dict[str, int]]:
            if name in self.broken:
                raise PeerError(f"{name}: out of everything")
            return Loaded(versions={}), 0.0, {"host_bytes": 0}

        engine.load = load  # type: ignore[attr-defined]
        yield engine
        self.loaded.discard(name)


@pytest.fixture
def tiny_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison takes a tiny model's shape for that of its model."""
    write_checkpoint(tmp_path / "model", SHAPES["tiny"])
    shape = read_model_shape(tmp_path / "model", "float32")
    monkeypatch.setattr(comparison, "read_model_shape", lambda *_: shape)


def compare_pair(session: LoggedSession, batches: list[Batch], in_turn: bool) -> list[tuple[str, Any]]:
    """What a comparison of two engines reports."""
    arguments = argparse.Namespace(dtype="float32", kv_tokens=128, orders=["shuffled"], repeats=2, in_turn=in_turn)
    return list(comparison.measure(session, PEERS[:2], batches, arguments))  # type: ignore[arg-type]


@pytest.mark.usefixtures("tiny_shape")
def test_engines_in_turn_get_the_same_prompts_and_are_never_in_memory_together() -> None:
    found = []
    for in_turn in (False, True):
        session = LoggedSession()
        report = compare_pair(session, [case_1_batch(), case_1_batch()], in_turn)
        assert session.most_loaded == (1 if in_turn else 2)
        names = [peer.name for peer in PEERS[:2]]
        workloads = [value for part, value in report if part == "workloads"][-1]
        assert [list(workload["engines"]) for workload in workloads] == [names] * 2
        measured = [value for part, value in report if part == "measured"]
        assert measured == ([(i, [name]) for name in names for i in (0, 1)] if in_turn else [(0, names), (1, names)])
        found.append((session.prompts, workloads))
    assert found[0] == found[1]


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.usefixtures("tiny_shape")
def test_an_engine_that_was_ended_is_loaded_again_for_the_next_workload(
    monkeypatch: pytest.MonkeyPatch, in_turn: bool
) -> None:
    """One workload takes too long; the engine may be fast enough for the others."""
    slow = case_1_batch()
    run = CountingEngine.run

    def run_once(engine: CountingEngine, work: Work, timeout_seconds: float) -> Any:
        if work.token_ids == slow.work("shuffled", round_number=1).token_ids:
            engine.has_ended = True
        if engine.has_ended:
            raise PeerError("run took more than 1 s")
        return run(engine, work, timeout_seconds)

    monkeypatch.setattr(CountingEngine, "run", run_once)
    report = compare_pair(LoggedSession(), [slow, slow], in_turn)
    first, second = [value for part, value in report if part == "workloads"][-1]
    for peer in PEERS[:2]:
        assert "failure" in first["engines"][peer.name]
        assert second["engines"][peer.name]["seconds"] == [2, 3]


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.usefixtures("tiny_shape")
def test_engines_that_cannot_be_loaded_do_not_keep_others_from_being_measured(in_turn: bool) -> None:
    first, second = PEERS[:2]

    def measure(*broken: str) -> list[tuple[str, Any]]:
        return compare_pair(LoggedSession(*broken), [case_1_batch()], in_turn)

    assert [value for part, value in measure(first.name) if part == "measured"] == [(0, [second.name])]
    with pytest.raises(PeerError, match=f"no figures: {first.name}: out of everything; {second.name}: out of"):
        measure(first.name, second.name)


def test_vllm_takes_a_share_of_the_device_that_it_computes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default on a GPU, nine tenths, is more than is free beside other processes."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 100 * 2**30))
    settings = LoadSettings(
        model=str(tmp_path), dtype="bfloat16", device="cuda", kv_tokens=128, kv_bytes=46 * 2**30,
        max_num_batched_tokens=64, max_model_len=64, num_threads=1, scratch="",
    )  # fmt: skip
    assert vllm_engine._memory_share(settings) == 0.5


def test_a_page_says_how_engines_took_turns_and_which_were_not_asked() -> None:
    """An engine that was ended during a workload has no figure for the later ones, and has not failed them."""
    folder = render.ROOT / "benchmarks" / "results" / "end_to_end" / "amx"
    in_turn, ended = (
        list(render.render_comparison(name, json.loads((folder / f"{name}.json").read_text())))
        for name in ("end_to_end_amx_bf16_1b", "end_to_end_amx_bf16_10000")
    )
    assert any("each engine all its rounds in one go" in line for line in in_turn)
    assert not any("in one go" in line for line in ended)
    cells = [line.split("|")[-2].strip() for line in ended if "| shuffled |" in line and "prompts of" in line]
    assert cells == ["failed", "not measured", "not measured", "not measured"]
