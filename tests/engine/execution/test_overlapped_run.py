"""Steps booked late, and steps with guessed tokens: under all policies the same answers, from the same KV."""

import dataclasses
import random
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig, Request, plan_prefix_groups
from engine.execution.output import TokenSampler
from engine.execution.overlapped_run import can_overlap, run_overlapped
from engine.execution.step_runner import run_steps
from engine.kernels.draw import draw_tokens
from engine.model.pending_tokens import fill_in
from engine.scheduling.admission import make_pool
from engine.scheduling.policies.preemption import SwapSpace
from engine.scheduling.policies.sharing import schedule_groups
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.token_batch import TokenBatch
from tests.engine.engine_configs import BLOCK_SIZE, engine_configs
from tests.engine.hash_model import (
    WINDOWS,
    EagerLookup,
    HashMemory,
    answer_without_end,
    kept_tables,
    poison_freed_blocks,
)

VOCAB_SIZE = 50
EOS = 2
LONG_LABELS = ((6, 8, 9, 10, 11, 12, 13, 14), (5, 6, 3), (7, 4))
LABEL_SETS = [((5,), (6, 7), (6, 8, 9, 10)), ((4,), (5,)), LONG_LABELS]


class HashModel(HashMemory):
    """KV memory and model in one; it computes steps in the order in which they are launched, as a stream does.

    Args:
        num_words: tokens that it says; one that says few repeats itself.
    """

    eos_token_ids = frozenset([EOS])
    vocab_size = VOCAB_SIZE
    draw_tokens = staticmethod(draw_tokens)

    def __init__(self, num_blocks: int, num_words: int = VOCAB_SIZE - EOS, windows: Sequence[int] = (0,)) -> None:
        super().__init__(num_blocks, windows)
        self.num_words = num_words
        self.num_steps = self.num_late_tokens = 0

    def forward(self, batch: TokenBatch, pending_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        self.num_steps += 1
        input_ids = torch.from_numpy(batch.input_ids)
        if batch.has_pending_tokens:
            assert pending_token_ids is not None
            self.num_late_tokens += int((input_ids < 0).sum())
            input_ids = fill_in(input_ids, pending_token_ids)
        return self.compute(batch, input_ids.numpy())

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """As good as certain of one token, and each other one unlikely in a way of its own."""
        scattered = (states[:, None] * 31 + torch.arange(VOCAB_SIZE) * 7) % 13
        certain = torch.nn.functional.one_hot(next_token(states, self.num_words), VOCAB_SIZE)
        return certain * 20.0 - scattered / 10

    def most_likely(self, states: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        return next_token(states, self.num_words)

    def label_logits(self, states: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return self.logits(states)[:, token_ids]

    def read_blocks(self, block_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        return self.blocks[block_ids]

    def write_blocks(self, block_ids: npt.NDArray[np.int32], kv: npt.NDArray[np.int64]) -> None:
        self.blocks[block_ids] = kv


def next_token(state: Any, num_words: int) -> Any:
    return EOS + state % num_words


def spell(token_ids: Sequence[int]) -> str:
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


def answer(request: Request, num_words: int = VOCAB_SIZE - EOS, windows: Sequence[int] = (0,)) -> list[int]:
    """What the hash model says, greedily, straight away."""
    said: list[int] = []
    words = answer_without_end(request.token_ids.tolist(), lambda state: next_token(state, num_words), windows)
    for token in islice(words, request.max_new_tokens):
        said.append(token)
        if (token == EOS and not request.ignore_eos) or any(stop in spell(said) for stop in request.stop):
            break
    return said


@st.composite
def workloads(draw: st.DrawFn) -> list[Request]:
    """Greedy and drawn answers that end by their length, an end token or a stop string; labels of many lengths."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    instruction = [3] * draw(st.integers(0, 9))
    documents = [[rng.randrange(3, 6) for _ in range(rng.randrange(12))] for _ in range(draw(st.integers(1, 3)))]
    requests = []
    for index in range(draw(st.integers(2, 12))):
        prompt = instruction + rng.choice(documents) + [rng.randrange(3, 9) for _ in range(rng.randrange(1, 8))]
        settings: dict[str, Any] = {"max_new_tokens": rng.randrange(1, 25), "ignore_eos": rng.random() < 0.5}
        kind = rng.randrange(4)
        if kind == 1:
            settings |= {"temperature": 5.0, "seed": index}
        elif kind == 2:
            settings |= {"stop": (rng.choice("abcdefgh"), "xyz")}
        elif kind == 3:
            settings = {"mode": "score", "labels": rng.choice(LABEL_SETS)}
        requests.append(Request(request_id=str(index), token_ids=prompt, **settings))
    return requests


CONFIGS = engine_configs(("path", "group", "none"))
"""What overlaps: all policies but those that need every token at once."""


@dataclasses.dataclass
class Run:
    """Answers by request, as they were given, and how the steps followed each other."""

    answers: dict[int, Any]
    killed: set[int]
    most_under_way: int
    num_late_tokens: int
    num_guessed_tokens: int = 0
    num_right_tokens: int = 0
    num_steps: int = 0


def run(
    requests: list[Request],
    config: EngineConfig,
    num_blocks: int,
    num_swap_blocks: int,
    overlaps: bool,
    num_words: int = VOCAB_SIZE - EOS,
    guesses: bool = False,
    windows: tuple[int, ...] = (0,),
) -> Run:
    tables = kept_tables(windows, config)
    num_blocks *= len(tables)
    pool, model = make_pool(config, num_blocks, tables), HashModel(num_blocks, num_words, windows)
    poison_freed_blocks(pool, model)
    groups = schedule_groups(requests, plan_prefix_groups([r.token_ids for r in requests]), (), config)
    swap = SwapSpace(model, num_swap_blocks if config.preemption == "swap" else 0)
    sampler = TokenSampler(model, spell)  # type: ignore[arg-type]
    lookup = EagerLookup(sampler) if guesses else None
    scheduler = Scheduler(groups, pool=pool, config=config, swap=swap, lookup=lookup)
    found = Run(answers={}, killed=set(), most_under_way=0, num_late_tokens=0)
    run = run_overlapped if overlaps else run_steps
    steps = run(scheduler, model.forward, sampler)
    ended: set[Any] = set()
    for num_committed, (step, ends) in enumerate(steps):
        found.most_under_way = max(found.most_under_way, model.num_steps - num_committed)
        assert pool.num_used <= pool.num_blocks
        assert sum(count for _, count in step.decodes) <= config.max_num_batched_tokens
        found.num_guessed_tokens += step.num_guessed_tokens
        found.num_right_tokens += step.num_right_tokens
        assert [answered for answered in ends if answered.finish_reason == "error"] == step.killed
        for answered in ends:
            assert answered not in ended, "answered twice"
            ended.add(answered)
            assert overlaps or not answered.has_late_row
            if answered.finish_reason == "error":
                continue
            scores = (answered.first_scores + answered.tail_sums).tolist()
            reason, tokens = answered.finish_reason, answered.output_token_ids
            for owner in answered.owners:
                assert owner not in found.answers
                found.answers[owner] = (reason, scores if reason == "scored" else tokens)
        found.killed |= {owner for sequence in step.killed for owner in sequence.owners}
    assert sorted([*found.answers, *found.killed]) == list(range(len(requests)))
    assert pool.num_used == pool.num_prefix_blocks == swap.num_used == 0
    found.num_late_tokens, found.num_steps = model.num_late_tokens, model.num_steps
    return found


@given(workloads(), CONFIGS, st.integers(0, 12), st.integers(0, 8), WINDOWS)
def test_answers_do_not_depend_on_when_steps_are_booked(
    requests: list[Request],
    config: EngineConfig,
    num_spare_blocks: int,
    num_swap_blocks: int,
    windows: tuple[int, ...],
) -> None:
    alone = [len(r.token_ids) + (r.max_new_tokens if r.mode == "generate" else 8) for r in requests]
    num_blocks = max(-(-num_tokens // BLOCK_SIZE) + 1 for num_tokens in alone) + num_spare_blocks
    in_turn = run(requests, config, num_blocks, num_swap_blocks, overlaps=False, windows=windows)
    overlapped = run(requests, config, num_blocks, num_swap_blocks, overlaps=True, windows=windows)
    assert in_turn.most_under_way == 1
    assert in_turn.num_late_tokens == 0
    for owner, request in enumerate(requests):
        said = [run.answers[owner] for run in (in_turn, overlapped) if owner in run.answers]
        assert len(said) < 2 or said[0] == said[1]
        if request.mode == "generate" and request.temperature == 0:
            assert all(tokens == answer(request, windows=windows) for _, tokens in said)


@given(workloads(), engine_configs(), st.integers(0, 12), st.integers(0, 8), st.integers(1, 3), WINDOWS)
def test_guesses_change_no_answer(
    requests: list[Request],
    config: EngineConfig,
    num_spare_blocks: int,
    num_swap_blocks: int,
    num_words: int,
    windows: tuple[int, ...],
) -> None:
    """Greedy or drawn, ended by a stop string, preempted or cut into chunks, booked late or not."""
    alone = [len(r.token_ids) + (r.max_new_tokens if r.mode == "generate" else 8) for r in requests]
    num_blocks = max(-(-num_tokens // BLOCK_SIZE) + 1 for num_tokens in alone) + num_spare_blocks
    runs = [run(requests, config, num_blocks, num_swap_blocks, False, num_words, windows=windows)]
    for overlaps in (False, True) if config.sharing != "lru" else (False,):
        runs.append(run(requests, config, num_blocks, num_swap_blocks, overlaps, num_words, True, windows))
    for owner, request in enumerate(requests):
        said = [run.answers[owner] for run in runs if owner in run.answers]
        assert all(answered == said[0] for answered in said)
        if request.mode == "generate" and request.temperature == 0:
            assert all(tokens == answer(request, num_words, windows) for _, tokens in said)


def test_labels_are_scored_right_after_one_that_was_swapped_out_before_its_end() -> None:
    """They begin at the prompt's end again, where a window sees blocks that the end of the label does not."""
    prompts = [[5, 3, 8], [3, 7, 4, 6]]
    requests = [
        Request(request_id=str(i), token_ids=prompt, mode="score", labels=LONG_LABELS)
        for i, prompt in enumerate(prompts)
    ]
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=6, output_reserve=0.0, preemption="swap")
    ample, tight = (run(requests, config, num_blocks, 8, overlaps=False, windows=(5,)) for num_blocks in (100, 5))
    assert tight.answers == ample.answers
    assert tight.num_steps > ample.num_steps


def test_guesses_save_steps_where_answers_repeat_themselves() -> None:
    prompts = [[3, 4, 5 + i] for i in range(6)]
    requests = [
        Request(request_id=str(i), token_ids=prompt, max_new_tokens=40, ignore_eos=True, temperature=i % 2)
        for i, prompt in enumerate(prompts)
    ]
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=64)
    plain = run(requests, config, 200, 0, overlaps=False, num_words=1)
    guessed = run(requests, config, 200, 0, overlaps=False, num_words=1, guesses=True)
    assert guessed.answers == plain.answers
    assert plain.num_guessed_tokens == 0
    assert 0 < guessed.num_right_tokens <= guessed.num_guessed_tokens
    assert guessed.num_steps < plain.num_steps / 2
    # Each token but the first of an answer is sampled from a right guess's row or from that of a known token.
    assert guessed.num_right_tokens >= sum(len(tokens) for _, tokens in guessed.answers.values()) / 2


def test_a_step_is_launched_before_the_one_before_is_booked() -> None:
    """Two steps are under way at most, tokens go on from step to step on the device, and an early end wastes a row."""
    prompts = [[3, 4, 5 + i] for i in range(6)]
    requests = [Request(request_id=str(i), token_ids=prompt, max_new_tokens=40) for i, prompt in enumerate(prompts)]
    found = run(requests, EngineConfig(block_size=BLOCK_SIZE, max_num_batched_tokens=64), 200, 0, overlaps=True)
    assert found.most_under_way == 2
    assert {reason for reason, _ in found.answers.values()} == {"eos", "length"}
    # Each token but the last of an answer is computed once as a token that the host did not know; so is one that ends
    # an answer early.
    lengths = [(len(tokens), reason) for reason, tokens in found.answers.values()]
    assert found.num_late_tokens == sum(length - (reason == "length") for length, reason in lengths)


def test_who_must_know_every_token_at_once_does_not_overlap() -> None:
    assert can_overlap(EngineConfig())
    assert not can_overlap(EngineConfig(sharing="lru"))
    assert not can_overlap(EngineConfig(prompt_lookup="always"))
    assert not can_overlap(EngineConfig(disaggregation="processes"))
