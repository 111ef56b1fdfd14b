"""What each answer cost, and who holds the KV memory: the parts add up to the whole, step by step."""

import random
from pathlib import Path

import numpy as np
import pytest

from engine import Completion, Engine, EngineConfig, Request, StepRecord, plan_prefix_groups
from engine.execution.step_record import StepMetrics
from engine.kv.block_pool import BlockPool
from engine.scheduling.prefix_node import PrefixNode
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step

NUM_LAYER_VALUES = 2 * 2 * 2 * 16
"""KV of one token of the tiny Llama: keys and values of two layers, two heads of 16 dimensions."""


def run(model: Path, requests: list[Request], num_kv_blocks: int) -> tuple[dict[str, Completion], list[StepRecord]]:
    """Answers by request id, and the steps, with so many KV blocks of 4 tokens."""
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        block_size=4,
        max_num_batched_tokens=24,
        output_reserve=0.0,
        kv_memory_bytes=num_kv_blocks * 4 * NUM_LAYER_VALUES * 4,
    )
    steps: list[StepRecord] = []
    groups = plan_prefix_groups([request.token_ids for request in requests])
    answers = list(Engine.load(model, config).run_plan(requests, groups, on_step=steps.append))
    assert steps[0].num_kv_blocks_total == num_kv_blocks
    return {answer.request_id: answer for answer in answers}, steps


@pytest.mark.parametrize("num_kv_blocks", [400, 26])
def test_costs_of_all_answers_add_up_to_the_time_of_all_steps(tiny_llama: Path, num_kv_blocks: int) -> None:
    rng = random.Random(5)
    documents = [[rng.randrange(3, 500) for _ in range(length)] for length in (40, 31, 18, 3)]
    prompts = [[*document, 3 + i, 7] for document in documents for i in range(4)] + [[*documents[0], 3, 7]]
    requests = [
        Request(request_id=f"g{i}", token_ids=prompt, max_new_tokens=9, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    requests += [
        Request(request_id=f"s{i}", token_ids=documents[1] + [9, i], mode="score", labels=((5, 6, 7), (8,)))
        for i in range(3, 6)
    ]
    requests.append(Request(request_id="too long", token_ids=[5] * 900, max_new_tokens=900))
    answers, steps = run(tiny_llama, requests, num_kv_blocks)
    assert (sum(step.num_preempted_requests for step in steps) > 0) == (num_kv_blocks == 26)
    total_ms = sum(step.duration_ms for step in steps)
    assert sum(answer.compute_ms for answer in answers.values()) == pytest.approx(total_ms)
    assert {key for key, answer in answers.items() if answer.compute_ms == 0} == {"g16", "too long"}
    if num_kv_blocks == 400:
        for step in steps:
            num_held = step.num_prefix_kv_blocks + step.num_request_kv_blocks
            assert num_held == step.num_kv_blocks_used, "nothing is kept for nobody"


def ask_about_document(model: Path, num_tokens: int) -> tuple[list[float], list[StepRecord]]:
    """What three requests on one prefix of so many tokens cost, and the steps."""
    rng = random.Random(6)
    document = [rng.randrange(3, 500) for _ in range(num_tokens)]
    requests = [Request(request_id=f"{i}", token_ids=[*document, 30 + i], max_new_tokens=1) for i in range(3)]
    answers, steps = run(model, requests, 100)
    assert [answers[f"{i}"].num_cached_tokens for i in range(3)] == [0, num_tokens, num_tokens]
    return [answers[f"{i}"].compute_ms for i in range(3)], steps


def test_a_prefix_is_paid_by_the_request_that_is_charged_with_it(tiny_llama: Path) -> None:
    costs, (first, second) = ask_about_document(tiny_llama, 24)  # fills the step
    assert (first.num_prefix_tokens, second.num_suffix_tokens) == (24, 3)
    assert (first.num_prefix_kv_blocks, first.num_request_kv_blocks) == (6, 0)
    assert (second.num_prefix_kv_blocks, second.num_request_kv_blocks) == (6, 3)
    third = second.duration_ms / 3
    assert costs == pytest.approx([first.duration_ms + third, third, third])


def test_requests_start_in_the_step_that_completes_their_prefix_and_the_first_pays(tiny_llama: Path) -> None:
    costs, (only,) = ask_about_document(tiny_llama, 20)
    assert (only.num_prefix_tokens, only.num_suffix_tokens) == (20, 3)
    assert (only.num_prefix_kv_blocks, only.num_request_kv_blocks) == (5, 3)
    share = only.duration_ms / 23
    assert costs == pytest.approx([21 * share, share, share])


def test_a_prefix_computed_again_is_paid_by_a_request_that_goes_on_decoding() -> None:
    """As one does whose own KV was swapped out and in: it has no prompt to compute."""
    request = Request(request_id="a", token_ids=[5, 6, 7, 8, 9])
    node = PrefixNode(parent=None, token_ids=np.array([5, 6, 7, 8], dtype=np.int32), start=0)
    sequence = Sequence(request=request, owners=(0,), node=node)
    metrics = StepMetrics(Scheduler([], pool=BlockPool(1, 1), config=EngineConfig(), swap=None))
    metrics.share_time(Step(block_size=1, room=0, prefixes={node: 4}), 8.0)
    step = Step(block_size=1, room=0, decodes=[(sequence, 1)])
    step.finalize(BlockPool(1, 1))
    metrics.share_time(step, 1.0)
    assert sequence.compute_ms == 9.0
