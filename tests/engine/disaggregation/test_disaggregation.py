"""Prompts computed in another process: the same answers, limits that hold, failures that surface, nothing left over."""

import dataclasses
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import pytest

from engine import Completion, Engine, EngineConfig, Request, StepRecord, plan_prefix_groups
from engine.disaggregation import disaggregated_run
from engine.disaggregation.prefill_client import PrefillClient
from engine.errors import ConfigError, ModelError, PrefillWorkerError
from tests.engine.answers import assert_alike

BLOCK_BYTES = 8 * 2 * 2 * 2 * 16 * 4  # of tokens, key and value, layers, KV heads, head dim, float32
AMPLE = EngineConfig(dtype="float32", device="cpu", block_size=8, attention="torch", num_threads=1,
                     kv_memory_bytes=1 << 22)  # fmt: skip
TIGHT = dataclasses.replace(
    AMPLE, disaggregation="processes", kv_memory_bytes=34 * BLOCK_BYTES, max_num_batched_tokens=64, output_reserve=0.0
)
"""Memory for the longest request and little more, handed out by what is held now, so that answers overrun it."""


def make_requests() -> list[Request]:
    """Questions below documents below an instruction, some twice; drawn and greedy answers, long labels."""
    rng = random.Random(8)
    instruction = [rng.randrange(3, 500) for _ in range(21)]
    documents = [instruction + [rng.randrange(3, 500) for _ in range(length)] for length in (17, 40, 70)]
    prompts = [document + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 30))] for document in documents * 8]
    prompts += [prompts[0], prompts[5], [7], [11] * 90]
    requests = []
    for index, prompt in enumerate(prompts):
        answer: dict[str, Any] = {"max_new_tokens": 4 + index * 7 % 37, "ignore_eos": True}
        if index % 4 == 3:
            answer = {"mode": "score", "labels": ((5,), (6, 7), (6, 8, 9, 10))}
        elif index % 5 == 0:
            answer |= {"temperature": 0.8, "seed": index}
        requests.append(Request(request_id=str(index), token_ids=prompt, **answer))
    return [*requests, Request(request_id="too long", token_ids=[5] * 900, max_new_tokens=200)]


REQUESTS = make_requests()
GROUPS = plan_prefix_groups([request.token_ids for request in REQUESTS])


def run(engine: Engine) -> tuple[dict[str, Completion], list[StepRecord]]:
    steps: list[StepRecord] = []
    answers = {answer.request_id: answer for answer in engine.run_plan(REQUESTS, GROUPS, on_step=steps.append)}
    assert len(answers) == len(REQUESTS)
    return answers, steps


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, Completion]:
    return run(Engine.load(tiny_llama, AMPLE))[0]


def worker_of(engine: Engine) -> "subprocess.Popen[bytes]":
    assert engine._prompt_process is not None
    assert engine._prompt_process.client is not None
    return engine._prompt_process.client._process


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_memory_bytes": 1 << 22, "attention": "native", "block_size": 32, "output_reserve": 1.0},
        {"prefill": "whole", "packing": "length_ordered", "preemption": "kill"},
    ],
    ids=["tight", "native", "whole"],
)
def test_the_answers_are_those_of_one_process(
    tiny_llama: Path, expected: dict[str, Completion], settings: dict[str, Any]
) -> None:
    engine = Engine.load(tiny_llama, dataclasses.replace(TIGHT, **settings))
    answers, steps = run(engine)
    too_long = answers.pop("too long")
    assert "exceeds the context of 1024" in str(too_long.error)
    killed = {key: answer for key, answer in answers.items() if answer.error is not None}
    assert bool(killed) == (settings.get("preemption") == "kill")
    assert_alike({key: answer for key, answer in answers.items() if key not in killed}, expected)
    num_preempted = sum(step.num_preempted_requests for step in steps)
    assert (num_preempted > 0) == ("kv_memory_bytes" not in settings)
    num_computed = sum(step.num_prefix_tokens + step.num_suffix_tokens for step in steps)
    num_charged = sum(answer.num_prompt_tokens - answer.num_cached_tokens for answer in answers.values())
    assert num_computed == num_charged if num_preempted == 0 else num_computed > num_charged or killed
    for step in steps:
        assert (step.num_decode_tokens > 0) != (step.num_prefix_tokens + step.num_suffix_tokens > 0)
        assert step.num_kv_blocks_used <= step.num_kv_blocks_total
    costs_ms = sum(answer.compute_ms for answer in answers.values())
    assert costs_ms == pytest.approx(sum(step.duration_ms for step in steps))
    if not settings:
        process = worker_of(engine)
        assert_alike(run(engine)[0], expected)
        assert worker_of(engine) is process
        del engine
        gc.collect()
        assert process.poll() is not None


def test_kv_of_8_bits_comes_over(tiny_llama: Path) -> None:
    """In int8 an answer is the same in any batch, so these are the same bit by bit."""
    config = dataclasses.replace(AMPLE, dtype="int8", attention="auto", block_size=32)
    expected, _ = run(Engine.load(tiny_llama, config))
    found, _ = run(Engine.load(tiny_llama, dataclasses.replace(config, disaggregation="processes")))
    assert {key: answer.token_ids for key, answer in found.items()} == {
        key: answer.token_ids for key, answer in expected.items()
    }


@pytest.mark.slow
def test_a_worker_that_fails_is_an_error_and_is_replaced(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory in which a worker's KV arrives is freed when the worker has failed, or its run was abandoned."""
    processes: list[subprocess.Popen[bytes]] = []
    clients: list[weakref.ref[PrefillClient]] = []

    def start(*given: Any) -> PrefillClient:
        client = PrefillClient(*given)
        processes.append(client._process)
        clients.append(weakref.ref(client))
        return client

    monkeypatch.setattr(disaggregated_run, "PrefillClient", start)
    shutil.copytree(tiny_llama, tmp_path / "model")
    engine = Engine.load(tmp_path / "model", TIGHT)
    answers = engine.run_plan(REQUESTS, GROUPS)
    assert next(answers).request_id == "too long"
    next(answers)
    worker_of(engine).kill()
    with pytest.raises(PrefillWorkerError, match="the process that computes prompts is gone; its exit status is -9"):
        list(answers)

    abandoned = engine.run_plan(REQUESTS, GROUPS)
    next(abandoned)
    next(abandoned)
    process = worker_of(engine)
    assert process.poll() is None
    abandoned.close()
    assert process.returncode is not None

    shutil.rmtree(tmp_path / "model")
    with pytest.raises(ModelError, match="no such file or folder"):
        list(engine.run_plan(REQUESTS, GROUPS))
    del answers, abandoned
    gc.collect()
    assert [client() for client in clients] == [None] * 3
    assert None not in [process.returncode for process in processes]


KILLED = """
import sys
sys.path[:0] = [{tests!r}, {root!r}]
from test_disaggregation import *

engine = Engine.load({model!r}, TIGHT)
answers = engine.run_plan(REQUESTS, GROUPS)
next(answers)
next(answers)
print(worker_of(engine).pid, flush=True)
signal.pause()
"""


def start(script: str, **values: object) -> "subprocess.Popen[str]":
    here = Path(__file__).parent
    text = script.format(tests=str(here), root=str(here.parents[2]), **values)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )


def test_no_worker_outlives_a_process_that_is_killed(tiny_llama: Path) -> None:
    with start(KILLED, model=str(tiny_llama)) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        worker = Path(f"/proc/{int(lines[-1])}")
        assert worker.exists()
        process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 120
    while worker.exists() and "State:\tZ" not in (worker / "status").read_text():
        assert time.monotonic() < deadline, "the worker is still there"
        time.sleep(0.02)


def test_a_loaded_model_is_refused(tiny_llama: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_llama)
    with pytest.raises(ConfigError, match="needs a checkpoint that both load, got a loaded model"):
        Engine.load(model, TIGHT)
