"""Prompts answered alone and in batches drawn at random, for models that promise the same bits either way."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from engine import Engine, Request, plan_prefix_groups
from engine.completion import Completion

Answers = dict[str, tuple[object, ...]]

KV_BYTES = 1 << 22
LABELS = ((5,), (9, 11), (9, 400, 3))


def requests_of(prompts: list[list[int]], numbers: list[int]) -> list[Request]:
    """Each prompt answered greedily, drawn, and scored."""
    asked = []
    for number in numbers:
        prompt = prompts[number]
        asked += [
            Request(request_id=f"g{number}", token_ids=prompt, max_new_tokens=6, ignore_eos=True),
            Request(request_id=f"d{number}", token_ids=prompt, max_new_tokens=4, temperature=1.0, seed=number),
            Request(request_id=f"s{number}", token_ids=prompt, mode="score", labels=LABELS),
        ]
    return asked


def answer(engine: Engine, requests: list[Request]) -> Answers:
    """Token ids, and scores as they are: not one bit of a logit may differ."""

    def kept(found: Completion) -> tuple[object, ...]:
        assert found.error is None
        return tuple(found.token_ids), found.label_logprobs

    plan = plan_prefix_groups([request.token_ids for request in requests])
    return {found.request_id: kept(found) for found in engine.run_plan(requests, plan)}


def answer_alone(engine: Engine, prompts: list[list[int]]) -> Answers:
    """Every request in a call of its own."""
    requests = requests_of(prompts, [*range(len(prompts))])
    return {name: found for one in requests for name, found in answer(engine, [one]).items()}


def check_any_batch(
    data: st.DataObject, load: Callable[..., Engine], prompts: list[list[int]], alone: Answers, **others: Any
) -> None:
    """Any rows together, shared or not, preempted or not, on one thread or two, are answered as alone.

    Args:
        data: draws rows and settings.
        load: an engine with the settings that it is given.
        prompts: of the rows.
        alone: what `answer_alone` returned.
        others: strategies of further settings.
    """
    numbers = data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, unique=True))
    chosen = data.draw(
        st.fixed_dictionaries(
            {
                "sharing": st.sampled_from(["path", "group", "lru", "none"]),
                "preemption": st.sampled_from(["recompute", "swap"]),
                "kv_memory_bytes": st.sampled_from([KV_BYTES, 1 << 18]),
                "output_reserve": st.sampled_from([0.0, 1.0]),
                **others,
            }
        )
    )
    before = torch.get_num_threads()
    torch.set_num_threads(data.draw(st.sampled_from([1, 2])))
    found = answer(load(**chosen), requests_of(prompts, numbers))
    torch.set_num_threads(before)
    assert len(found) == 3 * len(numbers)
    assert found == {name: alone[name] for name in found}
