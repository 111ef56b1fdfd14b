"""The host's time for a decode step, by part, without launches and the device's time."""

import statistics
import time

import numpy as np
import torch

from engine.config import EngineConfig
from engine.execution.output import TokenSampler
from engine.execution.step_record import StepMetrics
from engine.kernels.triton.tuned import TunedAttention
from engine.kernels.triton.work_list import build_work_list
from engine.planning.prefix_groups import plan_prefix_groups
from engine.request import Request
from engine.scheduling.admission import make_pool
from engine.scheduling.policies.sharing import schedule_groups
from engine.scheduling.scheduler import Scheduler

PREFIX_TOKENS, OWN_TOKENS, MEMBERS = 400, 50, 16
"""Tokens of a prompt's shared and own part, and requests per prefix."""

PARTS = ("schedule", "batch", "work list", "sample", "commit", "record")


def decode_step_ms(tuned: TunedAttention, *, num_rows: int = 512, num_steps: int = 100) -> dict[str, float]:
    """Milliseconds of the host for each part of a decode step, medians over the steps of one run, and their sum.

    Args:
        tuned: the launches for work lists; 32 query heads, 8 KV heads, 132 processors.
        num_rows: requests, which decode together in all steps.
        num_steps: tokens of each answer.
    """
    rng = np.random.default_rng(0)
    prefixes = [rng.integers(3, 500, PREFIX_TOKENS) for _ in range(-(-num_rows // MEMBERS))]
    requests = [
        Request(
            request_id=str(index),
            token_ids=np.concatenate([prefixes[index // MEMBERS], rng.integers(3, 500, OWN_TOKENS)]).astype(np.int32),
            max_new_tokens=num_steps,
        )
        for index in range(num_rows)
    ]
    config = EngineConfig(max_num_batched_tokens=8192, block_size=16, device="cpu", kv_memory_bytes=1 << 20)
    groups = schedule_groups(requests, plan_prefix_groups([request.token_ids for request in requests]), (), config)
    scheduler = Scheduler(groups, pool=make_pool(config, 40 * num_rows), config=config, swap=None)
    metrics, sampler = StepMetrics(scheduler), TokenSampler(_NoModel(), None)  # type: ignore[arg-type]
    taken_ms: dict[str, list[float]] = {part: [] for part in PARTS}
    while scheduler.num_unfinished:
        times = [time.perf_counter()]
        step = scheduler.schedule()
        times.append(time.perf_counter())
        batch = step.build_batch()
        times.append(time.perf_counter())
        build_work_list(batch.attention, tuned, group_size=4, num_kv_heads=8, policy="fused")
        times.append(time.perf_counter())
        tokens = sampler.sample(torch.zeros(step.num_output_rows, 1), step).wait()
        times.append(time.perf_counter())
        answered = scheduler.commit(step, tokens, sampler.follow)
        times.append(time.perf_counter())
        metrics.record(step, answered)
        times.append(time.perf_counter())
        if batch.attention.num_rows == len(step.sampled) == num_rows:
            for part, taken in zip(PARTS, np.diff(times), strict=True):
                taken_ms[part].append(float(taken) * 1e3)
    found = {part: statistics.median(taken) for part, taken in taken_ms.items()}
    return found | {"sum": sum(found.values())}


class _NoModel:
    """Gives token 7 in every row."""

    eos_token_ids = frozenset([2])
    vocab_size = 500

    def most_likely(self, hidden: torch.Tensor, allowed: torch.Tensor | None) -> torch.Tensor:
        return torch.full((len(hidden),), 7)
