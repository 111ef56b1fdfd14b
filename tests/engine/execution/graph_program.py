"""Run by test_step_graphs.py with TRITON_INTERPRET=1: answers with and without graphs, overlapped and in turn."""

import json
import logging
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch

from engine import Completion, Engine, EngineConfig, Request, plan_prefix_groups
from engine.execution.step_graphs import StepGraphs, find_buckets
from engine.kernels.triton.device_work import WorkCapacity
from engine.kernels.triton.triton_attention import TritonAttention
from tests.engine.execution.recorded_graph import RecordedGraph

CONFIG = EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 21, max_num_batched_tokens=96, block_size=16)


def make_requests() -> list[Request]:
    """Answers of many lengths, so that buckets change; some drawn, some that end early, some labels."""
    rng = random.Random(1)
    documents = [[rng.randrange(3, 500) for _ in range(length)] for length in (20, 37)]
    prompts = [[5, 6, 7] * 6 + documents[i % 2] + [rng.randrange(3, 500) for _ in range(1 + i)] for i in range(5)]
    requests = []
    for index, prompt in enumerate([*prompts, [9] * 3]):
        drawn = {"temperature": 0.9, "seed": index} if index % 3 == 1 else {}
        lengths = {"max_new_tokens": 3 + 2 * index, "ignore_eos": index % 2 == 0}
        requests.append(Request(request_id=str(index), token_ids=prompt, **drawn, **lengths))
    labels = ((5,), (6, 7), (8, 9, 10))
    requests.append(Request(request_id="s", token_ids=prompts[0], mode="score", labels=labels))
    return requests


def run(engine: Engine, requests: list[Request]) -> dict[str, Completion]:
    groups = plan_prefix_groups([request.token_ids for request in requests])
    return {answer.request_id: answer for answer in engine.run_plan(requests, groups)}


def assert_alike(answers: dict[str, Completion], expected: dict[str, Completion]) -> None:
    for request_id, wanted in expected.items():
        answer = answers[request_id]
        assert (answer.finish_reason, answer.token_ids) == (wanted.finish_reason, wanted.token_ids), request_id
        pairs = zip(answer.label_logprobs, wanted.label_logprobs, strict=True)
        assert all(abs(one - other) < 1e-5 for one, other in pairs), request_id


def graphed(
    model: str, attention: str, overlaps: bool, kind: type[RecordedGraph] = RecordedGraph
) -> tuple[Engine, list[RecordedGraph]]:
    engine = Engine.load(model, replace(CONFIG, attention=attention))
    engine._overlaps_steps = overlaps
    runner, graphs = engine._runner, []

    def make_graph(other: RecordedGraph | None) -> RecordedGraph:
        live = [bucket.graph for bucket in runner.graphs._buckets.values() if bucket.graph is not None]
        assert other in live if live else other is None, "a graph shares the memory of one that is there"
        graphs.append(kind())
        return graphs[-1]

    assert isinstance(runner.attention, TritonAttention)
    assert runner.attention.graphable is runner.attention
    runner.graphs = StepGraphs(
        runner.model,
        runner.cache,
        runner.attention,
        buckets=find_buckets(CONFIG.max_num_batched_tokens),
        max_model_len=engine.max_model_len,
        make_graph=make_graph,
    )
    return engine, graphs


class CompilerError(Exception):
    """As Triton's errors, no RuntimeError."""


class NoGraph(RecordedGraph):
    """The first capture fails for want of memory, the second in the compiler; the others succeed."""

    failures: ClassVar[list[Exception]] = []

    def capture(self, compute: Callable[[], None]) -> None:
        if self.failures:
            raise self.failures.pop()
        super().capture(compute)


class Refusal(logging.Handler):
    """Makes what the engine warns of an error."""

    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(record.getMessage())


WARNINGS_ARE_ERRORS = Refusal(logging.WARNING)


def check_what_has_no_graph(model: str, requests: list[Request], expected: dict[str, Completion]) -> None:
    """Captures that fail, and steps larger than the room reserved, are computed all the same."""
    engine_log = logging.getLogger("batchloom.engine")
    engine_log.removeHandler(WARNINGS_ARE_ERRORS)
    NoGraph.failures += [CompilerError("no such instruction"), torch.OutOfMemoryError("no room")]
    failing, graphs = graphed(model, "fused", True, NoGraph)
    assert_alike(run(failing, requests), expected)
    assert not NoGraph.failures
    assert [graph.num_replays for graph in graphs[:2]] == [0, 0]
    step_graphs = failing._runner.graphs
    assert (step_graphs.failures, len(step_graphs.capture_ms)) == (["no room", "no such instruction"], len(graphs))
    buckets = step_graphs._buckets.values()
    assert len(graphs) == sum(bucket.num_runs > 1 for bucket in buckets), "a failed capture was tried again"
    assert any(graph.num_replays for graph in graphs[2:]), "other buckets lost their graphs"
    engine_log.addHandler(WARNINGS_ARE_ERRORS)
    holds = WorkCapacity.holds
    WorkCapacity.holds = WorkCapacity.__eq__  # of a graph's work, which has room for other steps: never
    outgrown, graphs = graphed(model, "fused", True)
    assert_alike(run(outgrown, requests), expected)
    assert not graphs
    WorkCapacity.holds = holds


def main(model: str) -> None:
    logging.getLogger("batchloom.engine").addHandler(WARNINGS_ARE_ERRORS)
    requests = make_requests()
    expected = run(Engine.load(model, replace(CONFIG, attention="torch")), requests)
    for attention, overlaps in (("fused", True), ("paged", False)):
        engine, graphs = graphed(model, attention, overlaps)
        assert_alike(run(engine, requests), expected)
        print(json.dumps({"attention": attention, "replays": [graph.num_replays for graph in graphs]}))
    num_graphs = len(graphs)
    engine._runner.graphs.forget()
    few = requests[:3]
    expected_of_few = {request.request_id: expected[request.request_id] for request in few}
    assert_alike(run(engine, few), expected_of_few)
    assert len(graphs) > num_graphs, "graphs are captured again"
    check_what_has_no_graph(model, few, expected_of_few)


if __name__ == "__main__":
    main(sys.argv[1])
