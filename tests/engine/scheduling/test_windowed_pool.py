"""Block tables of layers with windows: what is held, what is given back, and that nothing is overwritten while seen."""

import random
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import Engine, EngineConfig, Request, plan_prefix_groups
from engine.kernels import cdiv
from engine.kv.block_pool import BlockPool
from engine.model.model import Model
from engine.model.proof.tiny_model import make_tiny_model, shrink
from engine.scheduling.admission import make_pool
from engine.scheduling.policies.sharing import schedule_groups
from engine.scheduling.prompt_lookup import MOST_GUESSES
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import Step
from engine.scheduling.windowed_pool import WindowedPool
from engine.thinking import Thinking
from tests.engine.hash_model import first_seen, kept_tables
from tests.engine.model.families import make_config

BLOCK_SIZE = 4


def make_sequence(rng: random.Random, kind: str) -> tuple[Sequence, int]:
    """A sequence, and most tokens that a step computes for its answer."""
    prompt, most = list(range(1, rng.randrange(2, 60))), rng.randrange(1, 60)
    settings: dict[str, Any] = {"max_new_tokens": most}
    chunk = 1 + MOST_GUESSES
    if kind.startswith("thinking"):
        thoughts = Thinking(end_token_id=7, closing=(6, 7, *range(8, 8 + rng.randrange(20))), max_tokens=30)
        settings = {"max_new_tokens": 30 + most, "thinking": thoughts}
        chunk += len(thoughts.closing)
        if kind == "thinking, grammar":
            settings["grammar"] = SimpleNamespace(opening=())
            chunk += most - 1
    elif kind == "score":
        settings, chunk = {"mode": "score", "labels": ((1,) * most, (2,))}, most
    return Sequence(request=Request(request_id="a", token_ids=prompt, **settings), owners=(0,), node=None), chunk


@given(
    st.randoms(use_true_random=False),
    st.sampled_from(["free", "thinking", "thinking, grammar", "score"]),
    st.lists(st.sampled_from([0, 1, 3, 8, 17, 30]), min_size=1, max_size=3),
)
def test_what_a_row_sees_is_not_overwritten(rng: random.Random, kind: str, windows: list[int]) -> None:
    """A prompt in chunks of any size, then an answer in chunks as long as they may be, in tables that grow late.
    Meanwhile its KV may be swapped out and in, with tokens that are known and were not computed."""
    pool = WindowedPool(400, BLOCK_SIZE, tuple(windows))
    sequence, most_chunk = make_sequence(rng, kind)
    most = len(sequence.own_token_ids) - 1
    held = np.full((400, BLOCK_SIZE), -1)
    sequence.reserve(pool, rng.randint(sequence.length, most))
    start = 0
    while start < most:
        is_prompt = start < sequence.num_suffix
        if not is_prompt and kind != "score" and rng.random() < 0.2:
            sequence.free_blocks(pool)
            held[:] = -1
            sequence.length = rng.randint(start + 1, most)
            sequence.reserve(pool, rng.randint(sequence.length, most))
            for column, window in enumerate(windows):
                kept = np.arange(first_seen(start, window), start)
                held[sequence.block_ids[kept // BLOCK_SIZE, column], kept % BLOCK_SIZE] = kept * len(windows) + column
        last, most_tokens = most, most_chunk
        if is_prompt:
            last, most_tokens = sequence.num_suffix, 30
        elif sequence.length - start > most_chunk:  # all known tokens, and guesses as far as the table reaches
            most_tokens = sequence.length - start + MOST_GUESSES
            last = min(most, max(sequence.length, len(sequence.block_ids) * BLOCK_SIZE))
        end = start + rng.randint(1, min(last - start, most_tokens))
        missing = pool.num_missing(sequence, end)
        num_free = pool.num_free
        sequence.reserve(pool, end)
        assert num_free - pool.num_free == max(0, missing)
        places = np.arange(end)
        for column, window in enumerate(windows):
            table = sequence.block_ids[:, column]
            written = places[start:]
            assert (table[written // BLOCK_SIZE] >= 0).all()
            held[table[written // BLOCK_SIZE], written % BLOCK_SIZE] = written * len(windows) + column
            seen = places[first_seen(start, window) :]
            assert (held[table[seen // BLOCK_SIZE], seen % BLOCK_SIZE] == seen * len(windows) + column).all(), (
                "a row sees what another token has left"
            )
        sequence.num_computed = start = end
        if is_prompt:
            step = Step(block_size=BLOCK_SIZE, room=0)
            step.suffixes.append((sequence, 0))
            left = pool.leave(step)
            held[left] = -1
            pool.free(left)
    sequence.free_blocks(pool)
    assert pool.num_used == 0


def run_alone(prompts: list[list[int]], windows: tuple[int, ...], num_new_tokens: int) -> list[int]:
    """KV blocks held in each step, with memory for everything."""
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=16)
    requests = [
        Request(request_id=str(i), token_ids=prompt, max_new_tokens=num_new_tokens, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    groups = schedule_groups(requests, plan_prefix_groups([r.token_ids for r in requests]), (), config)
    pool = make_pool(config, 4000, kept_tables(windows, config))
    scheduler = Scheduler(groups, pool=pool, config=config, swap=None)
    held = []
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        held.append(step.num_used_blocks)
        scheduler.commit(step, [7] * len(step.sampled), lambda sequence, place, token: ((), None))
    assert pool.num_used == pool.num_prefix_blocks == 0
    return held


def test_an_answer_holds_about_a_window_in_layers_that_have_one() -> None:
    prompt = list(range(1, 401))
    whole, both, window = (run_alone([prompt], windows, 200)[-1] for windows in ((0,), (0, 12), (12,)))
    assert whole == cdiv(599, BLOCK_SIZE)
    assert both == whole + window
    assert window <= cdiv(12 + 8, BLOCK_SIZE) + 1


def test_a_shared_prefix_holds_what_its_members_still_see() -> None:
    prompts = [[*range(1, 401), 500 + i] for i in range(30)]
    held = run_alone(prompts, (12,), 2)
    assert max(held) <= 100 + 30 * 2, "the prefix whole while it is computed"
    assert held[-1] <= cdiv(11, BLOCK_SIZE) + 1 + 30 * 2


@pytest.mark.parametrize(
    ("name", "preemption"),
    [("mistral, a window", "recompute"), ("gemma2", "swap"), ("gemma3_text", "recompute"), ("gpt_oss", "swap")],
)
def test_answers_are_those_of_ample_memory_though_freed_blocks_are_poisoned(
    name: str, preemption: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real model, whose answers would be others if it saw a block after it was freed."""
    rng = np.random.default_rng(2)
    document = rng.integers(3, 160, 130)
    requests = [
        Request(
            request_id=str(i),
            token_ids=np.concatenate([document[: 130 - i % 2 * 30], rng.integers(3, 160, 5 + 3 * i)]),
            max_new_tokens=30,
            ignore_eos=True,
        )
        for i in range(10)
    ]
    groups = plan_prefix_groups([request.token_ids for request in requests])
    config = make_config(name)
    tiny = make_tiny_model(shrink(config))
    answers, num_preempted = [], count()
    original = BlockPool._give_back
    for num_blocks in (400, 7):
        kv_shape = Model(tiny, device=torch.device("cpu"), owns_weights=False).kv_shape
        engine = Engine(
            Model(tiny, device=torch.device("cpu"), owns_weights=False),
            EngineConfig(
                dtype="float32", device="cpu", max_num_batched_tokens=48, output_reserve=0.0, preemption=preemption,
                kv_memory_bytes=num_blocks * 32 * kv_shape.bytes_per_token,
            ),
        )  # fmt: skip

        def give_back(pool: BlockPool, start: int, length: int, engine: Engine = engine) -> None:
            original(pool, start, length)
            for tensor in engine._cache.tensors:
                tensor[start : start + length] = 1e4  # finite: the rest of a block is read under a mask

        def note(step: Any) -> None:
            for _ in range(step.num_preempted_requests):
                next(num_preempted)

        monkeypatch.setattr(BlockPool, "_give_back", give_back)
        answers.append({a.request_id: a.token_ids for a in engine.run_plan(requests, groups, on_step=note)})
    assert answers[0] == answers[1]
    assert next(num_preempted) > 0
    for request in requests:
        ids = torch.from_numpy(request.token_ids.astype(np.int64))[None]
        tiny.set_attn_implementation("eager")
        with torch.inference_mode():
            made = tiny.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False, pad_token_id=0
            )
        assert made[0, ids.shape[1] :].tolist() == list(answers[0][request.request_id])
