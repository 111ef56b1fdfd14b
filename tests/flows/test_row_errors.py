"""Rows, memory and models that fail in the middle of a night: the failure is raised inside the real model's forward."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import AutoTokenizer

from engine.config import EngineConfig
from engine.errors import DeviceError, FailureRateError
from engine.model.layers import TiedEmbedding
from flows.command.run_flow import run_flow
from flows.nightly import nightly
from flows.settings import EngineSettings
from tasks.partitions import engine_host
from tasks.partitions.failing import judge_failure
from tasks.runs.infer_job import FailurePolicy, InferJob
from tests.sql.report_facts import read_facts

pytestmark = pytest.mark.usefixtures("prefect_server")

ROOT = Path(__file__).parents[2]
POISON = "~"
"""A character that no other text of the database holds, and a token of its own."""

AT_ONCE = FailurePolicy(retry_delay_seconds=0.01)


class Spoiler:
    """Raises in front of the embedding, where it is told to, and counts the model's forwards."""

    def __init__(self, error: Callable[[torch.Tensor], BaseException | None]) -> None:
        self.num_forwards = 0
        self._error = error

    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(module, (torch.nn.Embedding, TiedEmbedding)):
            self.num_forwards += 1
            error = self._error(inputs[0])
            if error is not None:
                raise error


@contextmanager
def spoiled(error: Callable[[torch.Tensor], BaseException | None]) -> Iterator[Spoiler]:
    spoiler = Spoiler(error)
    handle = register_module_forward_pre_hook(spoiler)
    try:
        yield spoiler
    finally:
        handle.remove()


@pytest.fixture
def on_poison(nights: Any) -> Callable[[torch.Tensor], Exception | None]:
    """Document d2, which three rows share, and a query that one row asks are what the model cannot compute."""
    nights.sql("update documents set body = body || ? where doc_id = 'd2'", [POISON])
    nights.sql("insert into queries values ('q-poison', ?)", [f"What is {POISON}?"])
    nights.sql("insert into snippet_requests values ('d0', 'q-poison')")
    (token,) = AutoTokenizer.from_pretrained(nights.model)(POISON, add_special_tokens=False).input_ids

    def error(token_ids: torch.Tensor) -> Exception | None:
        return RuntimeError("this cannot\nbe computed") if (token_ids == token).any() else None

    return error


BAD = {("d2", "q0"), ("d2", "q1"), ("d2", "q2"), ("d0", "q-poison")}


@pytest.mark.parametrize("partition_tokens", [1, 10_000_000])
def test_the_rows_that_fail_are_found_and_all_others_answered(
    nights: Any, on_poison: Any, caplog: pytest.LogCaptureFixture, partition_tokens: int
) -> None:
    nights.run("snippets")
    undisturbed = nights.answers()
    with spoiled(on_poison), caplog.at_level(logging.WARNING, "batchloom"):
        (summary,) = nights.run("snippets", full=True, failures=AT_ONCE, partition_tokens=partition_tokens)
    assert (summary.status, summary.num_ok, summary.num_errors) == ("completed", 9, 4)
    answers = nights.answers()
    reason = "RuntimeError: this cannot be computed"
    assert all(answers[pair] == ["error", None, reason] for pair in BAD)
    assert {pair: answer for pair, answer in answers.items() if pair not in BAD} == {
        pair: answer for pair, answer in undisturbed.items() if pair not in BAD
    }
    retries = [message for message in caplog.messages if f"trying again in 0.01 s: {reason}" in message]
    assert len(retries) == (2 if partition_tokens == 1 else 1)
    assert sum("trying again in 0.02 s" in message for message in caplog.messages) == len(retries)
    steps = "select count(*), count(distinct (partition, step)) from steps where run_id = ?"
    ((num_steps, num_distinct),) = nights.sql(steps, [summary.run_id])
    assert num_steps == num_distinct > 0
    assert not {"parts", "attempts", "progress"} & {path.name for path in (nights.runs / summary.run_id).iterdir()}

    (again,) = nights.run("snippets")
    assert (again.num_rows, again.num_ok, again.num_already_done) == (4, 4, 9)
    assert nights.answers() == undisturbed


def test_too_many_failing_rows_fail_the_run_and_the_good_ones_stay(nights: Any, on_poison: Any) -> None:
    settings = FailurePolicy(retry_delay_seconds=0, max_error_rate=0.3, error_rate_rows=13)
    message = r"^4 of 13 rows failed, max_error_rate allows 30%: RuntimeError: this cannot be computed \(4 rows\)$"
    with spoiled(on_poison), pytest.raises(FailureRateError, match=message):
        nights.run("snippets", failures=settings, partition_tokens=1)
    ((status, error, num_ok, num_errors),) = nights.sql("select status, error, num_ok, num_errors from runs")
    assert (status, num_ok, num_errors) == ("failed", 9, 4)
    assert error.startswith("FailureRateError: 4 of 13 rows failed")
    nights.sql("insert into snippet_requests values ('d-gone', 'q0'), (null, 'q0'), ('d0', 'q-gone')")
    with spoiled(on_poison):
        too_few = FailurePolicy(retry_delay_seconds=0, max_error_rate=0, error_rate_rows=5)
        (summary,) = nights.run("snippets", failures=too_few)
    assert (summary.status, summary.num_errors) == ("completed", 7), "four were tried; three could not be"


def test_too_many_invalid_rows_fail_the_run_before_the_model_loads_and_leave_the_answers(nights: Any) -> None:
    nights.run("snippets")
    answers, runs = nights.answers(), nights.sql("select * from runs")
    nights.sql("update documents set body = null")  # as where the job before this one failed
    strict = FailurePolicy(max_invalid_rate=0.005, error_rate_rows=12)
    message = r"^12 of 12 rows are invalid, max_invalid_rate allows 0\.5%: body is NULL \(12 rows\)$"
    with spoiled(lambda token_ids: None) as spoiler, pytest.raises(FailureRateError, match=message):
        nights.run("snippets", failures=strict)
    assert spoiler.num_forwards == 0
    assert (nights.answers(), nights.sql("select * from runs")) == (answers, runs)
    assert [path.name for path in nights.runs.glob("*-*/manifest.json")] == ["manifest.json"], "of the first run"
    nights.sql("update documents set body = 'The house is empty.' where doc_id <> 'd0'")
    (summary,) = nights.run("snippets", failures=FailurePolicy(max_invalid_rate=0.25, error_rate_rows=12))
    assert (summary.num_ok, summary.num_errors) == (9, 3), "a fourth is invalid, and may be"
    nights.sql("update documents set body = null where doc_id = 'd1'")
    of_all = FailurePolicy(max_invalid_rate=0.3, error_rate_rows=3)
    assert nights.run("snippets", failures=of_all)[0].num_errors == 3, "all new rows, but a fourth of all rows"


def test_invalid_rows_are_counted_by_reason(nights: Any) -> None:
    """A prompt that is too long counts, with any number of tokens."""
    nights.sql("update documents set body = ' ' where doc_id = 'd0'")
    nights.sql("update documents set body = repeat(body, 90) where doc_id in ('d1', 'd2')")
    reasons = (
        r"the prompt has # tokens, the limit is #: # of the model less # for the answer \(6 rows\); "
        r"body is empty \(3 rows\)$"
    )
    with pytest.raises(FailureRateError, match=f"^9 of 12 rows are invalid, max_invalid_rate allows 50%: {reasons}"):
        nights.run("snippets", failures=FailurePolicy(max_invalid_rate=0.5, error_rate_rows=1))
    assert nights.sql("select count(*) from snippets union all select count(*) from runs") == [(0,), (0,)]


def test_a_model_that_fails_on_everything_is_not_tried_row_by_row(
    nights: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    nights.sql("insert into queries select 'more' || i, 'Is it ' || i || '?' from range(20) as numbers (i)")
    nights.sql("insert into snippet_requests select doc_id, query_id from documents, queries where query_id like 'm%'")
    options = [*nights.inputs, "--workload", "snippets"]
    options += ["--dtype", "float32", "--kv-memory", "8MiB", "--retry-delay-seconds", "0"]
    with spoiled(lambda token_ids: RuntimeError(f"no step of {len(token_ids)} works")) as spoiler:
        assert run_flow(nightly, options) == 1
    error = "20 of 20 rows failed, max_error_rate allows 50%: RuntimeError: no step of 1 works (20 rows)"
    assert capfd.readouterr().err.splitlines()[-1] == f"nightly: {error}"
    assert spoiler.num_forwards == 40, "as many attempts as the sample has rows, then the sample"
    ((status, message, num_ok),) = nights.sql("select status, error, num_ok from runs")
    assert (status, message, num_ok) == ("failed", f"FailureRateError: {error}", 0)
    (summary,) = nights.run("snippets")
    assert summary.num_ok == 92


def test_a_device_that_fails_ends_the_run_at_once(nights: Any) -> None:
    with (
        spoiled(lambda token_ids: torch.AcceleratorError("an illegal memory access was encountered")) as spoiler,
        pytest.raises(DeviceError, match="the device fails: AcceleratorError: an illegal memory access"),
    ):
        nights.run("snippets", failures=AT_ONCE)
    assert spoiler.num_forwards == 1


def test_an_error_that_leaves_the_device_usable_is_one_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as that of an operation on an odd shape: the rows are tried again, and isolated."""
    error = torch.AcceleratorError("CUDA error: invalid configuration argument")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    assert judge_failure(error).reason == "AcceleratorError: CUDA error: invalid configuration argument"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with pytest.raises(DeviceError, match="the device fails: AcceleratorError"):
        judge_failure(error)


def test_a_device_that_failed_is_told_by_any_error_after_it(nights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later launch fails with an error of Triton or cuBLAS, for which no row is to blame."""

    def synchronize() -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with (
        spoiled(lambda token_ids: RuntimeError("Triton Error [CUDA]: an illegal memory access")) as spoiler,
        pytest.raises(DeviceError, match=r"the device fails: RuntimeError: Triton Error \[CUDA\]: an illegal"),
    ):
        nights.run("snippets", failures=AT_ONCE)
    assert spoiler.num_forwards == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_a_device_without_memory_has_not_failed(error: Exception) -> None:
    assert judge_failure(error).is_out_of_memory


def test_out_of_memory_on_the_device_lowers_the_budget_and_goes_on(
    nights: Any, answered: Any, caplog: pytest.LogCaptureFixture
) -> None:
    answered("snippets")
    undisturbed = nights.answers()
    ample = EngineSettings(dtype="float32", kv_memory="200MiB", max_num_batched_tokens=128)

    def error(token_ids: torch.Tensor) -> Exception | None:
        return torch.OutOfMemoryError("CUDA out of memory") if token_ids.numel() > 40 else None

    with spoiled(error), caplog.at_level(logging.WARNING, "batchloom"):
        (summary,) = nights.run("snippets", full=True, engine=ample, failures=AT_ONCE)
    assert (summary.num_ok, summary.num_errors) == (12, 0)
    assert nights.answers() == undisturbed
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [
        "out of memory: going on with 104,857,600 bytes for KV and 64 tokens in a step",
        "out of memory: going on with 67,108,864 bytes for KV and 32 tokens in a step",
    ]
    query = "select run_id, config->'engines_with_less_memory' as engines from runs where engines is not null"
    ((run_id, engines),) = nights.sql(query)
    assert run_id == summary.run_id
    assert json.loads(engines) == [
        {"max_num_batched_tokens": 64, "kv_memory_bytes": 100 << 20, "memory_fraction": 0.8},
        {"max_num_batched_tokens": 32, "kv_memory_bytes": 64 << 20, "memory_fraction": 0.8},
    ]
    widest = "select max(num_prefix_tokens + num_suffix_tokens + num_decode_tokens) from steps where run_id = ?"
    assert nights.sql(widest, [summary.run_id]) == [(32,)]


def test_the_run_has_the_step_tokens_that_an_engine_took_for_auto(nights: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine on a GPU does after its weights are loaded. The page counts steps as full by them."""
    load = engine_host._load_engine

    def load_as_on_a_gpu(job: InferJob, config: EngineConfig) -> Any:
        engine = load(job, config)
        if engine is not None and config.max_num_batched_tokens == "auto":
            engine.config = replace(engine.config, max_num_batched_tokens=16384)
        return engine

    monkeypatch.setattr(engine_host, "_load_engine", load_as_on_a_gpu)
    auto = EngineSettings(dtype="float32", kv_memory="200MiB")
    (summary,) = nights.run("snippets", engine=auto)
    query = "select config->>'step_tokens', config->'engines_with_less_memory' from runs where run_id = ?"
    assert nights.sql(query, [summary.run_id]) == [("16384", None)]
    assert read_facts(nights, summary.run_id).totals.max_num_batched_tokens == 16384

    once = [torch.OutOfMemoryError("CUDA out of memory")]
    with spoiled(lambda token_ids: once.pop() if once and token_ids.numel() > 40 else None):
        (summary,) = nights.run("snippets", full=True, engine=auto, failures=AT_ONCE)
    ((tokens, engines),) = nights.sql(query, [summary.run_id])
    assert tokens == "16384"
    assert [each["max_num_batched_tokens"] for each in json.loads(engines)] == [1024]


def test_a_row_that_no_memory_suffices_for_is_an_error_row(nights: Any, on_poison: Any) -> None:
    def error(token_ids: torch.Tensor) -> Exception | None:
        return torch.OutOfMemoryError("CUDA out of memory") if on_poison(token_ids) else None

    with spoiled(error):
        (summary,) = nights.run("snippets", failures=AT_ONCE)
    assert (summary.num_ok, summary.num_errors) == (9, 4)
    errors = nights.sql("select distinct error from snippets where status = 'error'")
    assert errors == [("OutOfMemoryError: CUDA out of memory",)]


@pytest.mark.slow
def test_a_host_without_the_memory_for_kv_takes_less(nights: Any, prefect_server: str) -> None:
    """A limit of the operating system, not of ours: 96 GiB of address space are refused, 6 GiB are given. torch's own
    libraries take 0.6 GiB of it, with CUDA 3."""
    program = (
        "import re, resource, sys, torch; from flows.command.run_flow import run_flow\n"
        "from flows.nightly import nightly\n"
        "peak = int(re.search(r'VmPeak:\\s+(\\d+)', open('/proc/self/status').read())[1])\n"
        "resource.setrlimit(resource.RLIMIT_AS, ((peak << 10) + (10 << 30),) * 2); sys.exit(run_flow(nightly))"
    )
    options = ["--dtype", "float32", "--kv-memory", "96GiB", "--max-num-batched-tokens", "1024", "--num-threads", "1"]
    done = subprocess.run(
        [sys.executable, "-c", program, *nights.inputs, "--workload", "snippets", *options],
        cwd=ROOT,
        env={**os.environ, "PREFECT_API_URL": prefect_server},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "out of memory: going on with 6,442,450,944 bytes for KV and 64 tokens in a step" in done.stdout
    assert "12 rows answered, 0 failed" in done.stdout
