"""Attention steps of known tiles: what a launch takes for them, and what each of its tiles costs by that."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.attention_batches import GroupSize, make_batch
from benchmarks.kernels.gpu import GpuRun, device_time
from benchmarks.kernels.least_squares import non_negative_least_squares
from benchmarks.measuring.wrong_answer import WrongAnswerError
from engine.kernels.attention_batch import AttentionBatch
from engine.kernels.reference import paged_attention_ref
from engine.kernels.triton.device_work import WorkCapacity
from engine.kernels.triton.fused import FusedAttention, PagedAttention
from engine.kernels.triton.relay import RelayAttention
from engine.kernels.triton.tuned import Launch
from engine.kernels.triton.work_list import TileField, WorkList

NUM_Q_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 32, 8, 16
REP_MS = 50.0
"""How long a step is measured: a candidate is run on dozens of them."""

LIMITS = {"balance": (0.5, 0.25, 1.0), "share_margin": (0.1, 0.0, 0.3)}
"""Of `TunedAttention`, in the order in which they are searched; the first value is what ships without a measurement."""

Backend = FusedAttention | RelayAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningStep:
    """A step, and the backends it is run with: with plain tiles only, or with prefix tiles as well."""

    groups: list[GroupSize]
    has_prefix_tiles: bool = False
    is_mixed: bool = False


def tuning_steps() -> Iterator[TuningStep]:
    """Steps that tell the costs apart: starts, KV from memory, KV read again, partial results; and long chunks."""
    for num_requests in (32, 256):
        for own in (64, 512, 2048):
            yield TuningStep(groups=[GroupSize(prefix_len=0, members=[(own, 1)]) for _ in range(num_requests)])
        for prefix in (512, 4096):
            for members in (4, 32):
                groups = [GroupSize(prefix_len=prefix, members=[(128, 1)] * members)] * (num_requests // members)
                yield TuningStep(groups=groups, has_prefix_tiles=True)
    for rows in (128, 512, 2048):
        alone = [GroupSize(prefix_len=0, members=[(rows, rows)]) for _ in range(7)]
        yield TuningStep(groups=alone, is_mixed=True)
        yield TuningStep(groups=[GroupSize(prefix_len=2048, members=[(rows, rows)] * 3)], is_mixed=True)


class TuningBench:
    """Measures launches for one element type and head dim; what the steps' results must be is computed once.

    Attributes:
        not_captured: "", or why times contain the host's (`DeviceTime.not_captured`).
        cost_errors: of the last launch measured, by step: what the fitted costs say over what was measured, less 1.
    """

    def __init__(
        self, run: GpuRun, dtype: torch.dtype, head_dim: int, steps: Iterable[TuningStep] | None = None
    ) -> None:
        """`steps` defaults to `tuning_steps()`."""
        self.not_captured = ""
        self.cost_errors: list[float] = []
        self._run = run
        self._dtype = dtype
        self._head_dim = head_dim
        self._steps = list(tuning_steps() if steps is None else steps)
        self._expected: dict[int, torch.Tensor] = {}

    def measure(self, launch: Launch) -> tuple[Launch, float]:
        """The launch with fitted costs, and the sum of its times in microseconds.

        Raises:
            WrongAnswerError: a result differs from the reference's.
        """
        features, slot_times = [], []
        num_slots = self._run.num_processors * launch.programs_per_processor
        for index, step in enumerate(self._steps):
            if step.is_mixed and launch.wide is None:
                continue
            kinds: tuple[type[Backend], ...] = (PagedAttention, RelayAttention)
            for kind in kinds if step.has_prefix_tiles else kinds[:1]:
                work_list, time_us = self._time(index, step, self._backend(kind), (launch,))
                features.append([num_slots, *(NUM_KV_HEADS * count_features(work_list))])
                slot_times.append(time_us * num_slots)
        found = non_negative_least_squares(np.array(features), np.array(slot_times))
        self.cost_errors = (np.array(features) @ found / np.array(slot_times) - 1).round(4).tolist()
        _, *costs = found
        shapes = [
            replace(shape, tile_us=a, kilotoken_us=b * 1000, reread_kilotoken_us=c * 1000, partial_us=d)
            for shape, (a, b, c, d) in zip(launch.shapes, np.array(costs).reshape(-1, 4).round(5).tolist(), strict=True)
        ]
        fitted = replace(launch, narrow=shapes[0], wide=shapes[1] if launch.wide else None)
        return fitted, sum(slot_times) / num_slots

    def find_limits(self, launches: Sequence[Launch], ends: float) -> dict[str, float]:
        """The `balance` and then the `share_margin` under which all steps take the least time, in the geometric mean.

        Args:
            launches: with measured costs; each step takes the best of them.
            ends: of `time.monotonic`; values for which no time is left are not tried, and the first stays.
        Raises:
            WrongAnswerError: a result differs from the reference's.
        """
        backend = self._backend(FusedAttention)
        found: dict[str, float] = {}
        for name, values in LIMITS.items():
            by_value: dict[float, float] = {}
            for value in values:
                if by_value and time.monotonic() >= ends:
                    break
                limits: dict[str, Any] = found | {name: value}
                backend.tuned = replace(backend.tuned, launches=tuple(launches), **limits)
                times = [self._time(index, step, backend, launches)[1] for index, step in enumerate(self._steps)]
                by_value[value] = float(np.log(times).mean())
            found[name] = min(by_value, key=lambda value: by_value[value])
        return found

    def _backend(self, kind: type[Backend]) -> Backend:
        return kind(
            num_q_heads=NUM_Q_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=self._head_dim, dtype=self._dtype,
            block_size=BLOCK_SIZE, device=self._run.device,
        )  # fmt: skip

    def _time(
        self, index: int, step: TuningStep, backend: Backend, launches: Sequence[Launch]
    ) -> tuple[WorkList, float]:
        """A step's tiles, and the time of one layer in microseconds after its result was compared."""
        batch, num_blocks = make_batch(step.groups, BLOCK_SIZE)
        query, k_cache, v_cache = self._inputs(batch, num_blocks)
        scale = self._head_dim**-0.5
        if index not in self._expected:
            self._expected[index] = paged_attention_ref(
                query.double(), k_cache.double(), v_cache.double(), batch, scale=scale
            )
        work_list = backend.plan(batch, launches)
        work = backend.reserve(WorkCapacity.of(work_list), work_list.launch)
        work.fill(work_list, batch.slot_mapping)
        attend = partial(backend.attend, query, k_cache, v_cache, work, scale=scale)
        error = float((attend().double() - self._expected[index]).abs().max())
        if not error < self._run.tolerance(self._dtype):
            raise WrongAnswerError(f"{backend.name} is wrong by {error}")
        found = device_time(attend, rep_ms=REP_MS)
        self.not_captured = self.not_captured or found.not_captured
        return work_list, found.us

    def _inputs(self, batch: AttentionBatch, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same query and caches for a step, whichever candidate is measured."""
        generator = torch.Generator(device=self._run.device).manual_seed(0)
        cache = (num_blocks, BLOCK_SIZE, NUM_KV_HEADS, self._head_dim)

        def normal(shape: tuple[int, ...]) -> torch.Tensor:
            return torch.randn(shape, dtype=self._dtype, device=self._run.device, generator=generator)

        return normal((batch.num_rows, NUM_Q_HEADS, self._head_dim)), normal(cache), normal(cache)


def count_features(work_list: WorkList) -> np.ndarray:
    """Of each shape: tiles, KV tokens read first, KV tokens read again, partial results; per KV head."""
    tiles = work_list.tiles[work_list.tiles[:, TileField.NUM_TOKENS] > 0]
    counts = np.zeros((len(work_list.launch.shapes), 4))
    seen: set[tuple[int, int]] = set()
    for tile in tiles:
        prefix_len, begin, end = (int(tile[f]) for f in (TileField.PREFIX_LEN, TileField.KV_BEGIN, TileField.KV_END))
        counted = counts[tile[TileField.IS_WIDE]]
        counted[0] += 1
        for entry, first, last in (
            (tile[TileField.PREFIX_ENTRY], begin, min(end, prefix_len)),
            (tile[TileField.OWN_ENTRY], max(begin - prefix_len, 0), end - prefix_len),
        ):
            if first < last:
                key = int(entry), first
                counted[2 if key in seen else 1] += last - first
                seen.add(key)
        counted[3] += tile[TileField.PART] >= 0
    return counts.reshape(-1)
