"""Prefixes of an earlier run: the same answers with and without, fewer tokens computed, whatever becomes of files."""

import gc
import logging
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import Completion, Engine, EngineConfig, Request, plan_prefix_groups
from engine.code_versions import code_versions
from engine.errors import BusyError, ConfigError
from engine.execution.step_record import StepRecord
from engine.keeping import keeping_engine, kept_run, prefix_keeper
from engine.keeping.keeping_engine import KeepingEngine
from engine.keeping.kept_run import KeptNode, KeptRun
from engine.keeping.prefix_store import PrefixStore
from engine.model import stock_model
from engine.model.adapters.adapter import Adapter
from engine.model.proof.tiny_model import VOCAB_SIZE, make_tiny_model, shrink
from tests.adapters import save_adapter
from tests.engine.answers import assert_alike
from tests.engine.model.families import make_config

CONFIG = EngineConfig(
    dtype="float32", device="cpu", attention="torch", block_size=8, kv_memory_bytes=1 << 20, max_num_batched_tokens=96
)


@pytest.fixture(autouse=True)
def cheap_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes faster than files are opened."""
    monkeypatch.setattr(prefix_keeper, "SECONDS_PER_FILE", -1.0)


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> Engine:
    return Engine.load(tiny_llama, CONFIG)


def keeping(tiny_llama: Path, folder: Path, **changes: object) -> KeepingEngine:
    config = replace(CONFIG, keep_prefixes_bytes=1 << 30, prefix_folder=str(folder), **changes)
    engine = KeepingEngine.load(tiny_llama, config)
    assert isinstance(engine, KeepingEngine)
    return engine


def ask(
    documents: Sequence[int], questions: Sequence[int], *, is_scored: bool = False, num_tokens: int = 500
) -> list[Request]:
    """Every question about every document; a document of number d has 20 + 9 d tokens behind 10 that all share."""
    requests = []
    for document in documents:
        text = np.random.default_rng(document).integers(3, num_tokens, 20 + 9 * document)
        for question in questions:
            words = np.random.default_rng(1000 + question).integers(3, num_tokens, 3 + question % 4)
            token_ids = np.concatenate([np.arange(5, 15), text, words]).astype(np.int32)
            how = {"mode": "score", "labels": ((7,), (9, 11))} if is_scored else {"max_new_tokens": 4}
            requests.append(Request(request_id=f"{document}-{question}", token_ids=token_ids, **how))
    return requests


def run(engine: Engine, requests: list[Request]) -> tuple[dict[str, Completion], int]:
    """The answers, and the prompt tokens that were computed."""
    steps: list[StepRecord] = []
    groups = plan_prefix_groups([request.token_ids for request in requests])
    answers = {answer.request_id: answer for answer in engine.run_plan(requests, groups, on_step=steps.append)}
    num_computed = sum(step.num_prefix_tokens + step.num_suffix_tokens for step in steps)
    assert num_computed == sum(answer.num_prompt_tokens - answer.num_cached_tokens for answer in answers.values())
    return answers, num_computed


def test_a_later_run_computes_questions_alone(plain: Engine, tiny_llama: Path, tmp_path: Path) -> None:
    first, second, third = ask(range(5), [1, 2]), ask(range(5), [3, 4, 5], is_scored=True), ask(range(5), [6])
    engine = keeping(tiny_llama, tmp_path / "kept")
    answers, num_first = run(engine, first)
    assert_alike(answers, run(plain, first)[0])
    for requests in (second, third):  # of the last, each is planned alone
        later = keeping(tiny_llama, tmp_path / "kept")
        answers, num_computed = run(later, requests)
        expected, num_plain = run(plain, requests)
        assert_alike(answers, expected)
        assert all(answer.finish_reason != "error" for answer in answers.values())
        # Of each document at most a block's rest is left, and a block of what all share.
        most = sum(len(request.token_ids) for request in requests) - len(requests) * 30 - 9 * 10 * len(requests) // 5
        assert num_computed <= most + 5 * 7 + 8 < num_plain / 2
    assert run(keeping(tiny_llama, tmp_path / "other"), first)[1] == num_first, (
        "another database has a cache of its own"
    )


def test_files_are_read_ahead_in_the_order_in_which_groups_start(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short documents start first, since their answers are longest for their prompts; the plan has another order."""
    monkeypatch.setattr(kept_run, "MOST_READ_AHEAD", 2)
    run(keeping(tiny_llama, tmp_path), ask(range(8), [1, 2]))
    take, were_ahead = KeptRun._take, []

    def record(self: KeptRun, name: str) -> torch.Tensor | None:
        were_ahead.append(name in self._mapped)
        return take(self, name)

    monkeypatch.setattr(KeptRun, "_take", record)
    run(keeping(tiny_llama, tmp_path), ask(range(8), [3, 4]))
    assert len(were_ahead) >= 8
    assert all(were_ahead)


def test_unusable_files_do_not_end_reading_ahead(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many files as may be read ahead are damaged, which is found before their groups start."""
    monkeypatch.setattr(kept_run, "MOST_READ_AHEAD", 2)
    run(keeping(tiny_llama, tmp_path), ask(range(8), [1, 2]))
    for path in sorted(tmp_path.glob("*.kv"), key=lambda path: path.stat().st_size)[:3]:  # which start first
        path.write_bytes(path.read_bytes()[:-1])
    load, take, were_ahead = KeptRun.load, KeptRun._take, []

    def load_later(self: KeptRun, node: KeptNode) -> None:
        wait(self._mapped.values())
        load(self, node)

    def record(self: KeptRun, name: str) -> torch.Tensor | None:
        were_ahead.append(name in self._mapped)
        return take(self, name)

    monkeypatch.setattr(KeptRun, "load", load_later)
    monkeypatch.setattr(KeptRun, "_take", record)
    run(keeping(tiny_llama, tmp_path), ask(range(8), [3, 4]))
    assert len(were_ahead) >= 4
    assert all(were_ahead)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    nights=st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
            st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
        ),
        min_size=2,
        max_size=3,
    ),
    num_blocks=st.integers(14, 40),
    damage=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_nights_answer_as_without(
    plain: Engine,
    tiny_llama: Path,
    tmp_path_factory: pytest.TempPathFactory,
    nights: list[tuple[list[int], list[int]]],
    num_blocks: int,
    damage: int,
    seed: int,
) -> None:
    """With memory for a few requests, so that prefixes are freed and read again, and with files damaged in between."""
    folder = tmp_path_factory.mktemp("kept") / "prefixes"
    block_bytes = 8 * 2 * 2 * 2 * 16 * 4
    engine = keeping(tiny_llama, folder, kv_memory_bytes=num_blocks * block_bytes)
    choices = random.Random(seed)  # which files there are depends on the time that reading and computing take
    for documents, questions in nights:
        requests = ask(documents, questions)
        assert_alike(run(engine, requests)[0], run(plain, requests)[0])
        files = sorted(folder.glob("*.kv"))
        for path in choices.sample(files, min(damage, len(files))):
            content = bytearray(path.read_bytes())
            content[choices.randrange(len(content))] ^= 0x55
            path.write_bytes(content)


def test_prefixes_of_another_adapter_are_not_found(tiny_llama: Path, tmp_path: Path) -> None:
    """Of an engine that exchanges adapters, as workloads of one model do."""
    one, other = (Adapter.find(save_adapter(tiny_llama, tmp_path / f"{seed}", seed)) for seed in (1, 2))
    config = replace(CONFIG, keep_prefixes_bytes=1 << 30, prefix_folder=str(tmp_path / "kept"))
    engine, requests = KeepingEngine.load(tiny_llama, config, adapter=one, keeps_base=True), ask(range(3), [1, 2])
    answers, num_first = run(engine, requests)
    engine.use_adapter(other)
    others, num_computed = run(engine, requests)
    assert num_computed == num_first
    assert_alike(others, run(Engine.load(tiny_llama, CONFIG, adapter=other), requests)[0])
    engine.use_adapter(one)
    again, num_computed = run(engine, requests)
    assert_alike(again, answers)
    assert num_computed < num_first / 2


def test_prefixes_of_another_version_are_not_found(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests, kept = ask(range(8, 11), [1, 2]), tmp_path / "kept"
    _, num_first = run(keeping(tiny_llama, kept), requests)
    assert run(keeping(tiny_llama, kept), requests)[1] < num_first / 2
    monkeypatch.setattr(keeping_engine, "code_versions", code_versions.__wrapped__)  # not cached
    monkeypatch.setattr("engine.code_versions.version", lambda package: "0.0")
    assert run(keeping(tiny_llama, kept), requests)[1] == num_first


def test_prefixes_of_other_layers_are_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """batchloom's own layers order the dimensions of Cohere's heads in another way than those of transformers."""
    checkpoint, kept = tmp_path / "model", tmp_path / "kept"
    make_tiny_model(shrink(make_config("cohere"))).save_pretrained(checkpoint)
    requests, how = ask(range(8, 11), [1, 2], num_tokens=VOCAB_SIZE), {"attention": "native", "block_size": 32}
    answers, num_first = run(keeping(checkpoint, kept, **how), requests)
    assert run(keeping(checkpoint, kept, **how), requests)[1] < num_first / 2
    monkeypatch.setattr(stock_model, "find_family", lambda *model: None)
    again, num_computed = run(keeping(checkpoint, kept, **how), requests)
    assert_alike(again, answers)
    assert num_computed == num_first


def test_a_run_that_ends_early_books_what_it_has_read_and_leaves_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    first, second = ask(range(5), [1, 2]), ask(range(5), [3, 4])
    run(keeping(tiny_llama, tmp_path / "kept"), first)
    engine = keeping(tiny_llama, tmp_path / "kept")
    keeper = engine._keeper
    assert keeper is not None
    last_use = "select max(used_at) from files"
    (written_at,) = keeper.store._index.execute(last_use).fetchone()
    answers = engine.run_plan(second, plan_prefix_groups([request.token_ids for request in second]))
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    (read_at,) = keeper.store._index.execute(last_use).fetchone()
    assert read_at > written_at
    del answers
    gc.collect()
    assert not [found for found in gc.get_objects() if isinstance(found, KeptRun)]
    assert_alike(run(engine, second)[0], run(keeping(tiny_llama, tmp_path / "other"), second)[0])


def test_a_refused_call_leaves_the_run_under_way_its_prefixes(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait to be written when the other call comes are written."""
    may_write, write = threading.Event(), PrefixStore.write

    def write_later(*given: Any) -> bool:
        assert may_write.wait(60)
        return write(*given)

    monkeypatch.setattr(PrefixStore, "write", write_later)
    first, second = ask(range(5), [1, 2]), ask(range(5), [3, 4])
    engine = keeping(tiny_llama, tmp_path / "kept", max_num_batched_tokens=32)
    groups = plan_prefix_groups([request.token_ids for request in first])
    answers = engine.run_plan(first, groups)
    for _ in range(4):
        next(answers)
    with ThreadPoolExecutor(1) as other, pytest.raises(BusyError):
        other.submit(run, engine, second).result()
    may_write.set()
    assert len(list(answers)) == len(first) - 4
    _, num_computed = run(engine, second)
    run(other_engine := keeping(tiny_llama, tmp_path / "other", max_num_batched_tokens=32), first)
    assert num_computed == run(other_engine, second)[1]


def test_what_costs_more_to_read_is_not_kept(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prefix_keeper, "SECONDS_PER_FILE", 10.0)
    run(keeping(tiny_llama, tmp_path / "kept"), ask(range(3), [1, 2]))
    assert not list((tmp_path / "kept").glob("*.kv"))
    with caplog.at_level(logging.WARNING):
        engine = keeping(tiny_llama, tmp_path / "no" / "such" / "folder")
    assert "no prefixes are kept" in caplog.text
    answers, _ = run(engine, ask([1], [1]))
    assert answers["1-1"].finish_reason != "error"


def test_all_is_computed_once_the_index_is_damaged(
    plain: Engine, tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in later runs of the engine; a line says so of reading and of writing."""
    engine = keeping(tiny_llama, tmp_path / "kept")
    run(engine, ask(range(3), [1, 2]))
    (tmp_path / "kept" / "index.sqlite").write_bytes(b"damaged" * 1000)
    for questions in ([3, 4], [5, 6]):
        requests = ask(range(5), questions)
        with caplog.at_level(logging.WARNING):
            answers, num_computed = run(engine, requests)
        expected, num_plain = run(plain, requests)
        assert_alike(answers, expected)
        assert num_computed == num_plain
    lines = [record.getMessage().partition(": ")[0] for record in caplog.records if record.levelno == logging.WARNING]
    assert sorted(lines) == ["no more prefixes are kept", "no more prefixes are read"]


def test_what_is_no_function_of_steps_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    engine = keeping(tiny_llama, tmp_path)
    with pytest.raises(ConfigError, match="on_step must be a function of step records, got 'x'"):
        list(engine.run_plan([], [], on_step="x"))  # type: ignore[arg-type]


def test_a_new_architecture_is_proven_without_a_warning_about_prefixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Tiny models of the proof are computed by engines that keep nothing."""
    monkeypatch.setenv("BATCHLOOM_CACHE", str(tmp_path / "cache"))
    make_tiny_model(shrink(make_config("granite"))).save_pretrained(tmp_path / "granite")
    keeping(tmp_path / "granite", tmp_path / "kept")
    assert list((tmp_path / "cache" / "proven").iterdir())
    assert "no prefixes are kept" not in caplog.text


def test_keeping_needs_a_folder(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder is not taken for one: its access would be changed, and some of its files deleted."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="keep_prefixes_bytes needs a prefix_folder"):
        KeepingEngine.load(tiny_llama, replace(CONFIG, keep_prefixes_bytes=1 << 30))
    with pytest.raises(ConfigError, match="keep_prefixes_bytes is a setting of KeepingEngine"):
        Engine.load(tiny_llama, replace(CONFIG, keep_prefixes_bytes=1 << 30, prefix_folder="kept"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("changes", [{"sharing": "lru"}, {"sharing": "none"}, {"disaggregation": "processes"}])
def test_what_shares_nothing_keeps_nothing(changes: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="keep_prefixes needs sharing path or group, and disaggregation none"):
        replace(CONFIG, keep_prefixes_bytes=1, **changes)
