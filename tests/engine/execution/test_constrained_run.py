"""Forced tokens as chunks, under all policies, limits and overlaps: each token is computed from KV that is there."""

import random
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import Engine, EngineConfig, Grammar, Request, StepRecord, Vocabulary, plan_prefix_groups
from engine.execution.constrained_sampler import ConstrainedSampler
from engine.execution.overlapped_run import run_overlapped
from engine.execution.step_runner import run_steps
from engine.kernels.torch_output_layer import mask_logits
from engine.model.pending_tokens import fill_in
from engine.scheduling.admission import make_pool
from engine.scheduling.policies.preemption import SwapSpace
from engine.scheduling.policies.sharing import schedule_groups
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.token_batch import TokenBatch
from tests.engine.engine_configs import BLOCK_SIZE, engine_configs
from tests.engine.grammars import load_vocabulary
from tests.engine.hash_model import WINDOWS, EagerLookup, HashMemory, first_seen, kept_tables, mix, poison_freed_blocks

VOCAB_SIZE = 512
EOS = 2
PATTERNS = (
    r"name: [a-f]{1,3}, (true|false), in all there are [0-9]+\.",
    r"the only one",
    r"[a-z ]{0,6}",
    r"[ab]{0,40}",
    r"((yes|no), it is so\. )*",
    None,
)
"""The two before the last repeat themselves, in tokens chosen and in tokens forced, so that guesses are right."""


class HashModel(HashMemory):
    """A logit depends on all KV, and so does which of the allowed tokens has the largest."""

    device = torch.device("cpu")
    vocab_size = VOCAB_SIZE
    eos_token_ids = frozenset([EOS])

    def forward(self, batch: TokenBatch, pending_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        input_ids = torch.from_numpy(batch.input_ids)
        if batch.has_pending_tokens:
            assert pending_token_ids is not None
            input_ids = fill_in(input_ids, pending_token_ids)
        return self.compute(batch, input_ids.numpy())

    def most_likely(self, states: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        logits = logits_of(states)
        return (logits if allowed is None else mask_logits(logits, allowed)).argmax(-1)

    def read_blocks(self, block_ids: Any) -> Any:
        return self.blocks[block_ids]

    def write_blocks(self, block_ids: Any, kv: Any) -> None:
        self.blocks[block_ids] = kv


def logits_of(states: torch.Tensor) -> torch.Tensor:
    return ((states[:, None] * 31 + torch.arange(VOCAB_SIZE) * 7919) % 1009).float()


@pytest.fixture(scope="module")
def grammars(tiny_llama: Path) -> list[Grammar | None]:
    vocabulary: Vocabulary = load_vocabulary(tiny_llama)
    return [None if pattern is None else Grammar.from_pattern(pattern, vocabulary) for pattern in PATTERNS]


def answer(request: Request, windows: tuple[int, ...]) -> list[int]:
    """What the hash model says under the grammar, straight away, token by token."""
    tokens, states, said = request.token_ids.tolist(), list[int](), list[int]()
    matcher = None if request.grammar is None else request.grammar.new_matcher()
    forced: list[int] = []
    for place in count():
        state = mix(sum(sum(states[first_seen(place, window) :]) for window in windows), tokens[place])
        states.append(state)
        if place < len(request.token_ids) - 1:
            continue
        forced = forced[1:]
        if matcher is not None and not forced:
            forced = matcher.compute_ff_tokens()
        if forced:
            token = forced[0]
        else:
            logits = logits_of(torch.tensor([state]))
            if matcher is not None:
                logits = mask_logits(
                    logits, torch.frombuffer(bytearray(matcher.compute_bitmask()), dtype=torch.int32)[None]
                )
            token = int(logits.argmax())
        said.append(token)
        if token == EOS or len(said) == request.max_new_tokens:
            return said
        if matcher is not None:
            assert matcher.consume_token(token)
        tokens.append(token)
    raise AssertionError


@given(
    st.integers(0, 2**32),
    engine_configs(("path", "group", "none", "lru")),
    st.integers(0, 12),
    st.integers(0, 8),
    st.booleans(),
    st.booleans(),
    WINDOWS,
)
def test_constrained_answers_are_those_of_a_model_asked_token_by_token(
    grammars: list[Grammar | None],
    seed: int,
    config: EngineConfig,
    num_spare_blocks: int,
    num_swap_blocks: int,
    overlaps: bool,
    guesses: bool,
    windows: tuple[int, ...],
) -> None:
    rng = random.Random(seed)
    documents = [[3] * rng.randrange(9) + [rng.randrange(3, 6) for _ in range(rng.randrange(12))] for _ in range(2)]
    requests = [
        Request(
            request_id=str(index),
            token_ids=rng.choice(documents) + [rng.randrange(3, 9) for _ in range(rng.randrange(1, 8))],
            max_new_tokens=rng.choice([1, 2, 5, 12, 30, 45]),
            grammar=rng.choice(grammars),
        )
        for index in range(rng.randrange(2, 10))
    ]
    alone = [-(-(len(r.token_ids) + r.max_new_tokens) // BLOCK_SIZE) + 1 for r in requests]
    num_blocks = max(alone) + num_spare_blocks
    tables = kept_tables(windows, config)
    num_blocks *= len(tables)
    pool, model = make_pool(config, num_blocks, tables), HashModel(num_blocks, windows)
    poison_freed_blocks(pool, model)
    groups = schedule_groups(requests, plan_prefix_groups([r.token_ids for r in requests]), (), config)
    swap = SwapSpace(model, num_swap_blocks if config.preemption == "swap" else 0)
    sampler = ConstrainedSampler(model, None)  # type: ignore[arg-type]
    lookup = EagerLookup(sampler) if guesses else None
    scheduler = Scheduler(groups, pool=pool, config=config, swap=swap, lookup=lookup)
    run = run_overlapped if overlaps and config.sharing != "lru" else run_steps
    ended: list[int] = []
    for step, answered in run(scheduler, model.forward, sampler):
        assert pool.num_used <= pool.num_blocks
        if config.prefill == "chunked":
            num_tokens = sum(count for _, count in (*step.decodes, *step.suffixes)) + sum(step.prefixes.values())
            assert num_tokens <= config.max_num_batched_tokens
        for found in answered:
            ended += found.owners
            if found.finish_reason == "error":
                assert found in step.killed
                continue
            said, request = found.output_token_ids, found.request
            assert said == answer(request, windows)
            assert (found.finish_reason == "eos") == (said[-1] == EOS)
    assert sorted(ended) == list(range(len(requests)))
    assert pool.num_used == pool.num_prefix_blocks == swap.num_used == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_guesses_save_steps_of_constrained_answers_that_repeat_themselves(tiny_llama: Path, temperature: float) -> None:
    vocabulary = load_vocabulary(tiny_llama)
    grammars = [Grammar.from_pattern(text, vocabulary) for text in (r"[ab]{60}", r"((yes|no), it is so\. ){12}")]
    requests = [
        Request(
            request_id=str(index), token_ids=[5, 6, 7 + index], max_new_tokens=200, grammar=grammar,
            temperature=temperature, seed=index,
        )
        for index, grammar in enumerate(grammars * 2)
    ]  # fmt: skip
    said, steps = [], []
    for prompt_lookup in ("never", "always"):
        config = EngineConfig(dtype="float32", device="cpu", kv_memory_bytes=1 << 22, prompt_lookup=prompt_lookup)
        records: list[StepRecord] = []
        groups = plan_prefix_groups([request.token_ids for request in requests])
        answers = Engine.load(tiny_llama, config).run_plan(requests, groups, on_step=records.append)
        said.append({answer.request_id: answer.token_ids for answer in answers})
        steps.append(records)
    assert said[0] == said[1]
    assert sum(step.num_right_tokens for step in steps[1]) > 20
    assert len(steps[1]) < len(steps[0])
