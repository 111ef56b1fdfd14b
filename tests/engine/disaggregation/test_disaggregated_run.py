"""Two memories and one scheduler: whatever the timing, each token is computed from KV that is there and is right."""

import random
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import EngineConfig, Request, plan_prefix_groups
from engine.disaggregation.disaggregated_run import run_disaggregated
from engine.disaggregation.prefill_client import written_blocks
from engine.execution.output import TokenSampler
from engine.scheduling.admission import make_pool
from engine.scheduling.policies.preemption import SwapSpace
from engine.scheduling.policies.sharing import schedule_groups
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.token_batch import TokenBatch
from tests.engine.engine_configs import BLOCK_SIZE
from tests.engine.hash_model import WINDOWS, HashMemory, answer_without_end, kept_tables, poison_freed_blocks


class Cache(HashMemory):
    """The memory of one of the two processes."""

    block_size = BLOCK_SIZE

    def __init__(self, num_blocks: int, windows: tuple[int, ...]) -> None:
        super().__init__(num_blocks, windows)
        self.keys = [torch.zeros(1)]

    def forward(self, batch: TokenBatch, pending_token_ids: torch.Tensor | None = None) -> torch.Tensor:
        assert not batch.has_pending_tokens
        return self.compute(batch, batch.input_ids)


class LateWorker:
    """Computes steps in turn, at any time between sending and taking."""

    def __init__(self, cache: Cache, memory: Cache, rng: random.Random) -> None:
        self._cache, self._memory = cache, memory
        self._rng = rng
        self._waiting: list[TokenBatch] = []
        self._done: list[tuple[npt.NDArray[np.int32], npt.NDArray[Any], torch.Tensor]] = []

    @property
    def can_send(self) -> bool:
        return len(self._waiting) + len(self._done) < 2

    def send(self, batch: TokenBatch, *, is_compiled: bool) -> None:
        self._waiting.append(batch)
        self._work()

    def take(self, *, waits: bool) -> torch.Tensor | None:
        self._work()
        if not self._done:
            if not waits:
                return None
            self._compute()
        block_ids, kv, hidden = self._done.pop(0)
        self._cache.blocks[block_ids] = kv
        return hidden

    def _work(self) -> None:
        while self._waiting and self._rng.random() < 0.5:
            self._compute()

    def _compute(self) -> None:
        batch = self._waiting.pop(0)
        hidden = self._memory.forward(batch)
        block_ids = written_blocks(batch)
        self._done.append((block_ids, self._memory.blocks[block_ids], hidden))


class HashHead:
    """The output layer of the hash model."""

    eos_token_ids = frozenset[int]()

    def most_likely(self, states: torch.Tensor, allowed: torch.Tensor | None = None) -> torch.Tensor:
        return next_token(states)


def next_token(state: Any) -> Any:
    return 2 + state % 97


@given(st.integers(0, 2**32).map(random.Random), st.integers(4, 14), st.integers(0, 8), WINDOWS)
def test_each_token_is_computed_from_kv_that_is_there(
    rng: random.Random, num_prompts: int, num_spare_blocks: int, windows: tuple[int, ...]
) -> None:
    instruction = [1] * rng.randrange(10)
    documents = [[rng.randrange(2, 5) for _ in range(rng.randrange(12))] for _ in range(3)]
    prompts = [
        instruction + rng.choice(documents) + [rng.randrange(2, 9) for _ in range(rng.randrange(1, 8))]
        for _ in range(num_prompts)
    ]
    packing = rng.choice(["ragged", "prepacked", "padded", "length_ordered"])
    config = EngineConfig(
        disaggregation="processes",
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=rng.randrange(1, 25),
        output_reserve=rng.choice([0.0, 1.0]),
        sharing=rng.choice(["path", "group", "none"]),
        max_running_requests=rng.choice(["memory", 3]),
        batching=rng.choice(["continuous", "static", "dynamic"]),
        prefill="whole" if packing != "ragged" else rng.choice(["chunked", "whole"]),
        packing=packing,
        preemption=rng.choice(["recompute", "kill"]),
    )
    requests = [
        Request(request_id=str(index), token_ids=prompt, max_new_tokens=rng.randrange(1, 25))
        for index, prompt in enumerate(prompts)
    ]
    num_blocks = max(-(-(len(r.token_ids) + r.max_new_tokens) // BLOCK_SIZE) + 1 for r in requests) + num_spare_blocks
    tables = kept_tables(windows, config)
    num_blocks *= len(tables)
    cache, there = Cache(num_blocks, windows), Cache(num_blocks, windows)
    pool, worker = make_pool(config, num_blocks, tables), LateWorker(cache, there, rng)
    poison_freed_blocks(pool, cache, there)
    groups = schedule_groups(requests, plan_prefix_groups(prompts), (), config)
    scheduler = Scheduler(groups, pool=pool, config=config, swap=SwapSpace(cache, 0))  # type: ignore[arg-type]
    sampler = TokenSampler(HashHead(), None)  # type: ignore[arg-type]
    steps = run_disaggregated(scheduler, cache.forward, sampler, worker, is_compiled=False)  # type: ignore[arg-type]
    ended: list[int] = []
    for step, answered in steps:
        assert pool.num_used <= pool.num_blocks
        assert not (step.decodes and (step.suffixes or step.prefixes))
        for found in answered:
            ended += found.owners
            if found.finish_reason == "error":
                assert found in step.killed
                continue
            said = answer_without_end(prompts[found.owners[0]], next_token, windows)
            assert found.output_token_ids == list(islice(said, found.request.max_new_tokens))
    assert sorted(ended) == list(range(len(requests)))
    assert pool.num_used == 0
