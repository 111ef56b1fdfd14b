"""Every policy, and combinations of them, on one workload in tight memory: the answers are always the same."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest

from engine import Completion, Engine, EngineConfig, Penalties, Request, StepRecord, plan_prefix_groups
from engine.config import Batching, Lookup, Order, Packing, Preemption, Sharing
from tests.engine.answers import assert_alike

BLOCK_BYTES = 8 * 2 * 2 * 2 * 16 * 4  # of tokens, key and value, layers, KV heads, head dim, float32
AMPLE = EngineConfig(dtype="float32", device="cpu", block_size=8, kv_memory_bytes=1 << 22)
TIGHT = dataclasses.replace(AMPLE, kv_memory_bytes=34 * BLOCK_BYTES, max_num_batched_tokens=64, output_reserve=0.0)
"""Memory for the longest request and little more, handed out by what is held now, so that answers overrun it."""

LABEL_SETS = (((5,), (6, 7), (6, 8, 9, 10)), ((11,), (12,)))
Settings = dict[str, Any]

CHOICES: dict[str, tuple[Any, ...]] = {
    "order": get_args(Order),
    "sharing": get_args(Sharing),
    "max_running_requests": ("memory", 3),
    "batching": get_args(Batching),
    "prefill": ("chunked", "whole"),
    "packing": get_args(Packing),
    "preemption": get_args(Preemption),
    "prompt_lookup": get_args(Lookup),
}


def whole_where_packed(settings: Settings) -> Settings:
    return settings if settings.get("packing", "ragged") == "ragged" else {**settings, "prefill": "whole"}


def combinations(count: int) -> list[Settings]:
    """Drawn from all of them; each also in another chunk size, some with an ample reserve or hardly any host memory."""
    rng = random.Random(11)
    every = [dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())]
    limits = {
        "max_num_batched_tokens": (9, 64, 300),
        "output_reserve": (0.0, 0.0, 1.0),
        "swap_memory_bytes": ("auto", 30_000),
    }
    return [
        {**whole_where_packed(settings), **{name: rng.choice(values) for name, values in limits.items()}}
        for settings in rng.sample(every, count)
    ]


SINGLE = [
    whole_where_packed({name: value})
    for name, values in CHOICES.items()
    for value in values
    if value != getattr(AMPLE, name) or name == "preemption"
]
"""Of the settings that are defaults, one stands for all."""

LARGER_WINDOW = {"batching": "dynamic", "max_num_batched_tokens": 400}
"""Or else a batch is too small to overrun the memory."""
MIXED = [LARGER_WINDOW, *combinations(20)]


def spell(token_ids: Sequence[int]) -> str:
    """A decoder for stop strings: each token is a letter."""
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


@pytest.fixture(scope="module")
def workload(tiny_llama: Path) -> list[Request]:
    """Documents below an instruction, prompts alone, duplicates; answers of many lengths, drawn ones, penalties, stops,
    labels."""
    rng = random.Random(5)
    instruction = [rng.randrange(3, 500) for _ in range(21)]
    documents = [instruction + [rng.randrange(3, 500) for _ in range(length)] for length in (17, 40, 70)]
    prompts = [document + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 30))] for document in documents * 6]
    prompts += [prompts[0], prompts[7], instruction, [7], [11] * 60, prompts[3], prompts[4]]
    rng.shuffle(prompts)
    requests = []
    for index, prompt in enumerate(prompts):
        hints = {"priority": index % 3, "expected_output_tokens": (None, 4, 60)[index % 3]}
        if index % 4 == 3:
            answer: dict[str, Any] = {"mode": "score", "labels": LABEL_SETS[index % 2]}
        else:
            drawn = {"temperature": 0.8, "seed": index} if index % 5 == 0 else {}
            penalised = {"penalties": Penalties(repetition=1.4, presence=0.5, frequency=0.2)} if index % 6 == 2 else {}
            answer = {"max_new_tokens": 4 + index * 7 % 37, "ignore_eos": True, **drawn, **penalised}
        requests.append(Request(request_id=str(index), token_ids=prompt, **hints, **answer))
    for index in (1, 8):
        text = spell(Engine.load(tiny_llama, AMPLE).generate([requests[index]])[0].token_ids)
        requests[index] = dataclasses.replace(requests[index], stop=(text[3:6],))
    return requests


@pytest.fixture(scope="module")
def expected(tiny_llama: Path, workload: list[Request]) -> dict[str, Completion]:
    answers, _ = run(tiny_llama, workload, AMPLE)
    assert {answers[request_id].finish_reason for request_id in ("1", "8")} == {"stop"}
    return answers


def run(
    checkpoint: Path, requests: list[Request], config: EngineConfig, *, overlaps_steps: bool = False
) -> tuple[dict[str, Completion], list[StepRecord]]:
    steps: list[StepRecord] = []
    groups = plan_prefix_groups([request.token_ids for request in requests])
    engine = Engine.load(checkpoint, config)
    engine._overlaps_steps = overlaps_steps  # which only a GPU's engine does by itself
    answers = {c.request_id: c for c in engine.run_plan(requests, groups, decode=spell, on_step=steps.append)}
    assert len(answers) == len(requests)
    return answers, steps


def name_of(settings: Settings) -> str:
    return " ".join(map(str, settings.values()))


@pytest.mark.parametrize("settings", SINGLE + MIXED, ids=name_of)
def test_no_policy_changes_an_answer(
    tiny_llama: Path, workload: list[Request], expected: dict[str, Completion], settings: Settings
) -> None:
    answers, steps = run(tiny_llama, workload, dataclasses.replace(TIGHT, **settings))
    killed = [answer for answer in answers.values() if answer.error is not None]
    for answer in killed:
        assert settings["preemption"] == "kill"
        assert "KV memory ran out when" in str(answer.error)
        assert answer.finish_reason == "error"
    assert_alike({key: answer for key, answer in answers.items() if answer.error is None}, expected)
    num_preempted = sum(step.num_preempted_requests for step in steps)
    if "max_running_requests" in settings and settings["max_running_requests"] != "memory":
        assert max(step.num_running_requests for step in steps) <= settings["max_running_requests"]
    elif (settings in SINGLE and settings != {"batching": "dynamic"}) or settings is LARGER_WINDOW:
        assert num_preempted > 0
        assert bool(killed) == (settings.get("preemption") == "kill")
    # What was computed is what was not cached, and again after each preemption that keeps nothing.
    num_computed = sum(step.num_prefix_tokens + step.num_suffix_tokens for step in steps)
    num_charged = sum(answer.num_prompt_tokens - answer.num_cached_tokens for answer in answers.values())
    if not killed:
        assert num_computed == num_charged if num_preempted == 0 else num_computed >= num_charged
    if settings.get("sharing") == "none":
        assert all(answer.num_cached_tokens == 0 for answer in answers.values())


@pytest.mark.parametrize("limits", [AMPLE, TIGHT], ids=["ample", "tight"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_overlapped_steps_change_no_answer(
    tiny_llama: Path, workload: list[Request], expected: dict[str, Completion], limits: EngineConfig, preemption: str
) -> None:
    config = dataclasses.replace(limits, attention="torch", preemption=preemption)
    answers, steps = run(tiny_llama, workload, config, overlaps_steps=True)
    assert answers.keys() == expected.keys()
    assert_alike(answers, expected)
    assert (sum(step.num_preempted_requests for step in steps) > 0) == (limits is TIGHT)
    assert sum(step.num_finished_requests for step in steps) == len(workload)
    costs_ms = sum(answer.compute_ms for answer in answers.values())
    assert costs_ms == pytest.approx(sum(step.duration_ms for step in steps))


def test_swapped_kv_is_not_computed_again(tiny_llama: Path, workload: list[Request]) -> None:
    """The same preemptions: with room on the host no prompt token twice, with room for a block hardly any saved."""
    num_computed = []
    for preemption, swap_memory_bytes in (("swap", "auto"), ("swap", BLOCK_BYTES), ("recompute", "auto")):
        config = dataclasses.replace(
            TIGHT, preemption=preemption, swap_memory_bytes=swap_memory_bytes, sharing="none", order="fcfs"
        )
        answers, steps = run(tiny_llama, workload, config)
        num_computed.append(sum(step.num_suffix_tokens for step in steps))
        assert sum(step.num_preempted_requests for step in steps) > 0
    assert num_computed[0] == sum(answer.num_prompt_tokens for answer in answers.values()) < num_computed[1]
    assert num_computed[1] <= num_computed[2]


def test_the_cache_finds_what_the_plan_knows(tiny_llama: Path, workload: list[Request]) -> None:
    """In ample memory the LRU cache saves part of what the plan saves; what is said to be cached is not computed."""
    num_computed = {}
    for sharing in ("none", "lru", "group", "path"):
        answers, steps = run(
            tiny_llama, workload, dataclasses.replace(AMPLE, sharing=sharing, max_num_batched_tokens=64)
        )
        num_computed[sharing] = sum(step.num_prefix_tokens + step.num_suffix_tokens for step in steps)
        assert num_computed[sharing] == sum(a.num_prompt_tokens - a.num_cached_tokens for a in answers.values())
    assert num_computed["none"] == sum(answer.num_prompt_tokens for answer in answers.values())
    assert num_computed["path"] < num_computed["group"] < num_computed["none"]
    assert num_computed["path"] < num_computed["lru"] < num_computed["none"]
